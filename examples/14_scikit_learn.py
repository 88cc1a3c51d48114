"""A classifier with no architecture to choose, in an ordinary scikit-learn search."""

from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline

from sensli.integrations.sklearn import GrowingClassifier

x, y = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(x, y, random_state=0)

classifier = GrowingClassifier(members=3, layers=1, width=32, max_width=64, random_state=0, verbose=1).fit(
    train_x, train_y
)
print(f"accuracy {classifier.score(test_x, test_y):.3f} with hidden layers of {classifier.widths_} units")
print(classifier.predict_proba(test_x[:1]).round(3))

pipeline = make_pipeline(PCA(20), GrowingClassifier(members=3, width=32, max_layers=2, max_width=32, random_state=0))
print(f"cross-validated after a PCA: {cross_val_score(pipeline, x, y, cv=3).mean():.3f}")
