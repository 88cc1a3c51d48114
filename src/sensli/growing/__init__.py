"""When, whether and where a model grows while it trains: triggers, the Grower, its log, and the checkpoint from which training resumes."""
