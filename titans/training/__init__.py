"""From raw text to a trained model: tokenisers, prepared data, and the Trainer with carried memory."""
