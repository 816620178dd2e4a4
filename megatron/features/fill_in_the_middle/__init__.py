"""Fill-in-the-middle: samples whose middle is moved to the end."""
