"""Ledgers of real runs, one set for each release, whose decisions every later version must make alike."""
