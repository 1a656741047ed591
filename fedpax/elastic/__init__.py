"""Jobs whose hosts are lost and return: membership, keeper, copies in memory."""
