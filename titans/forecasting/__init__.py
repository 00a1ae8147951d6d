"""Time series: reading them, training forecasters on them, forecasting from the whole past, and neuralforecast."""
