"""The dialect of Anthropic's Messages API: requests become chat requests, answers are told in blocks."""
