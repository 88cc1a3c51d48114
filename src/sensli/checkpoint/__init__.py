"""From a checkpoint training resumes to the bit: what it holds, how its file is written and read, and how its parts go back."""
