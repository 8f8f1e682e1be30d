"""The agent `http`: a service of the user's own gets the task and the model's address, and answers."""
