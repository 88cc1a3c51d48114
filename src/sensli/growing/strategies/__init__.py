"""What `Grower` could do at a look, one file each: what is proposed, how it is scored, what is taken. None of them changes the model."""
