"""From a checkpoint to folders that other people's code loads."""
