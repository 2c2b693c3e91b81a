"""What recorded runs prove: two of them compared, one decided again, one sent again."""
