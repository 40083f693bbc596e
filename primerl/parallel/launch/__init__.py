"""Process launch: process groups, stop signals, detection of failed ranks, and CPU settings."""
