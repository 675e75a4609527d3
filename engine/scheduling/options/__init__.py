"""What some requests ask for beyond tokens in a row: searches, forks, and what their options do at a commit."""
