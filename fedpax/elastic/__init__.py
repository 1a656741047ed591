"""Jobs whose hosts are lost and return: membership, coordinator, copies in memory."""
