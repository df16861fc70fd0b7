"""Role `server`: one model server, which rollout workers sample from by its address."""
