"""The OpenAPI document: written by hand beside the routes, held against them by tests."""
