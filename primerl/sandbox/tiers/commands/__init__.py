"""Tiers that start one host program per job: containers and gVisor."""
