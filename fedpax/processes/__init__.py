"""The hosts of one job: how they find each other, agree, and exchange values."""
