"""OpenAI's Responses: the dialect of agents, translated into chat requests, and what is stored of them."""
