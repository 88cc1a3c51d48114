"""Estimators with no architecture to choose: numbers, then a table with words, a date and gaps as it is."""

import datetime

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline

from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor

x, y = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(x, y, random_state=0)

classifier = GrowingClassifier(members=3, layers=1, width=32, max_width=32, bins=1, random_state=0, verbose=1)
classifier.fit(train_x, train_y)
print(f"accuracy {classifier.score(test_x, test_y):.3f} with hidden layers of {classifier.widths_} units")
print(classifier.predict_proba(test_x[:1]).round(3))

pipeline = make_pipeline(PCA(20), GrowingClassifier(members=3, width=32, max_layers=2, max_width=32, random_state=0))
print(f"cross-validated after a PCA: {cross_val_score(pipeline, x, y, cv=3).mean():.3f}")

random = np.random.default_rng(0)
shops = random.choice(["north", "south", "west"], 400)
days = [datetime.date(1968, 1, 1) + datetime.timedelta(days=int(day)) for day in random.integers(0, 2000, 400)]
sizes = [None if place % 9 == 0 else size for place, size in enumerate(random.normal(size=400))]
table = np.array(list(zip(shops, days, sizes, strict=True)), dtype=object)  # or a frame of pandas or polars
sales = 3.0 * (shops == "north") + np.array([2.0 * (day.weekday() > 4) for day in days])
regressor = GrowingRegressor(random_state=0).fit(table[:300], sales[:300])
print(f"R2 {regressor.score(table[300:], sales[300:]):.2f} with {len(regressor.model_.members)} networks")
print(f"a shop that is new: {regressor.predict([['east', datetime.date(2030, 1, 5), None]])[0]:.1f}")
