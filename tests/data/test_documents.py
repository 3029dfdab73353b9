import pytest

from jaxseek.data.documents import Document, split_by_name
from jaxseek.errors import UserError

DOCUMENTS = tuple(Document(f"package/module{i}.py", f"x = {i}\n") for i in range(400))


def names(documents):
    return [document.name for document in documents]


def test_split_is_a_partition_that_keeps_order_and_share():
    split = split_by_name(DOCUMENTS, validation_fraction=0.1)
    assert sorted(split.train + split.validation) == sorted(DOCUMENTS)
    assert names(split.train) == [n for n in names(DOCUMENTS) if n in set(names(split.train))]
    assert 25 <= len(split.validation) <= 55


def test_split_depends_on_the_name_alone():
    validation = set(names(split_by_name(DOCUMENTS, validation_fraction=0.1).validation))
    other_texts = tuple(Document(name, "other") for name, _ in reversed(DOCUMENTS))
    assert set(names(split_by_name(other_texts, validation_fraction=0.1).validation)) == validation
    half = DOCUMENTS[:200]
    half_validation = set(names(split_by_name(half, validation_fraction=0.1).validation))
    assert half_validation == validation & set(names(half))


def test_split_is_the_same_on_every_machine():
    split = split_by_name(DOCUMENTS[:40], validation_fraction=0.1)
    numbers = (5, 17, 22, 23, 26, 35)
    assert names(split.validation) == [f"package/module{number}.py" for number in numbers]


def test_larger_fraction_only_adds_to_validation():
    small = set(names(split_by_name(DOCUMENTS, validation_fraction=0.05).validation))
    large = set(names(split_by_name(DOCUMENTS, validation_fraction=0.2).validation))
    assert small < large


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_sides_get_a_document(count, fraction):
    split = split_by_name(DOCUMENTS[:count], validation_fraction=fraction)
    assert split.train
    assert split.validation


def test_single_document_is_cut_behind_a_line():
    text = "".join(f"line {i}\n" for i in range(100))
    split = split_by_name([Document("book.txt", text)], validation_fraction=0.25)
    (train,), (validation,) = split.train, split.validation
    assert train.text + validation.text == text
    assert train.text.endswith("\n")
    assert len(validation.text) / len(text) == pytest.approx(0.25, abs=0.02)
    assert train.name != validation.name


def test_single_document_without_lines_is_cut_anyway():
    split = split_by_name([Document("a.txt", "title\n" + "x" * 9994)], validation_fraction=0.1)
    assert len(split.validation[0].text) == 1000


def test_no_validation_when_the_fraction_is_zero():
    assert split_by_name(DOCUMENTS, validation_fraction=0).train == DOCUMENTS
    assert split_by_name(DOCUMENTS, validation_fraction=0).validation == ()


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_impossible_fraction_is_refused(fraction):
    with pytest.raises(UserError, match="validation_fraction"):
        split_by_name(DOCUMENTS, validation_fraction=fraction)
