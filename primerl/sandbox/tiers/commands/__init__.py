"""Tiers that run a program for each order: container engines and gVisor."""
