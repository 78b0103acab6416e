"""What averaging does, as pure mathematics: graphs, gossip, the distance of models."""
