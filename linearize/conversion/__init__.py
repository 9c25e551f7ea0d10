"""Convert a model: find its attentions, plan, carry out the plan; extend it to longer inputs."""
