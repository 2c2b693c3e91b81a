"""Clients that send what no client should."""
