"""What averaging does, as pure mathematics: graphs, mixing matrices, gossip, limits."""
