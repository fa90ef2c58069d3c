"""P/D serving layer over ``models.glm53`` and ``cptools``; its parts arrive with the serving milestone."""
