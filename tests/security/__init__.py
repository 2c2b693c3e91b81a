"""What attackers may try, and what must not get out."""
