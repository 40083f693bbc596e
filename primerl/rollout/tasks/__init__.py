"""Task streams, mixtures and curricula, which decide which task is played next."""
