"""Converting a model: look at its attentions, plan, and carry the plan out; longer inputs."""
