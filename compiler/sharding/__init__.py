"""Where every array lies, and why: logical axis rules to PartitionSpecs."""
