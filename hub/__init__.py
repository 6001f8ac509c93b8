"""Publishing: model card, export and import, push to the Hub."""
