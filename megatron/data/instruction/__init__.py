"""Instructions and answers as packed samples with a loss on the answers."""
