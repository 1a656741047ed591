import itertools

import pytest
from each_value import fewest_with_each_value


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (4, 3), (1, 5), (3, 2, 4), (2, 2, 2, 2)])
def test_each_value_occurs_in_as_few_cases_as_the_longest_parameter_has(sizes: tuple[int, ...]):
    values = [[object() for _ in range(size)] for size in sizes]
    cases = [dict(zip("abcd", case, strict=False)) for case in itertools.product(*values)]
    chosen = fewest_with_each_value(cases)
    assert len(chosen) == max(sizes)
    for name, of_name in zip("abcd", values, strict=False):
        assert {id(cases[k][name]) for k in chosen} == set(map(id, of_name))


def test_cases_that_a_product_lacks_are_not_needed():
    first, second, third = (object() for _ in range(3))
    cases = [{"a": first, "b": second}, {"a": third, "b": second}]
    assert fewest_with_each_value(cases) == {0, 1}
