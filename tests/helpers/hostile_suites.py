# ruff: noqa: E501 - programs for sandboxes
"""Modules that cheat with what their tests share with them; no test of these may pass."""

# Finds the server of the code under test, and asks the tests' side for whatever it likes.
SERVER = """
import gc
def server():
    return next(one for one in gc.get_objects() if type(one).__name__ == "CodeUnderTest")
def asked(**request):
    try:
        return server().call_test(**request)
    except BaseException as error:
        return error
def number_of(stub):
    return server()._references.stubs[id(stub)]
def stolen(value):
    return not isinstance(value, BaseException)
"""

# By name: the module, and tests that only an honest module would pass.
SUITES = {
    "skips": (
        "import unittest\ndef f(): raise unittest.SkipTest('no')\n",
        "def test_f():\n    assert m.f() == 1\n",
    ),
    "skips_by_a_subclass": (
        "import unittest\nclass Skip(unittest.SkipTest): pass\ndef f(): raise Skip('no')\n",
        "def test_f():\n    assert m.f() == 1\n",
    ),
    "skips_by_pytest": (
        (
            "class Skipped(Exception): pass\nSkipped.__module__ = 'Skipped'\nSkipped.__qualname__ = 'Skipped'\n"
            "class Exit(BaseException): pass\ndef f(): raise Exit(0)\ndef g(): raise Skipped('x')\n"
        ),
        "def test_f():\n    assert m.f() == 1\ndef test_g():\n    assert m.g() == 1\n",
    ),
    "suppresses_its_own_error": (
        """
class Account:
    @property
    def balance(self): raise KeyError("none")
    def __enter__(self): return self
    def __exit__(self, *error): return True
""",
        "def test_f():\n    with m.Account() as account:\n        assert account.balance == 5\n",
    ),
    "replaces_failures": (
        """
class Account:
    balance = 0
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): raise LookupError
""",
        """
def test_f():
    with pytest.raises(LookupError):
        with m.Account() as account:
            assert account.balance == 5
            account.missing()
def test_g():
    with pytest.raises(LookupError):
        with m.Account():
            pytest.fail("not reached")
""",
    ),
    "truth_without_bool": (
        """
class Thing: pass
class Number:
    def __sub__(self, other): return Thing()
    def __lt__(self, other): return Thing()
    __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __lt__
    __hash__ = object.__hash__
    def __divmod__(self, other): return (Thing(), Thing())
    def __contains__(self, other): return False
def f(): return Number()
""",
        """
def test_less():
    assert m.f() < 5
def test_equal():
    assert m.f() == 5
def test_reflected():
    assert 5 == m.f()
def test_difference():
    assert m.f() - 1.5
def test_parts():
    assert divmod(m.f(), 3)[1]
def test_between():
    assert 1 < m.f() < 3
""",
    ),
    "equal_content": (
        """
class Text(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
class Row(tuple):
    __eq__ = Text.__eq__
    __hash__ = tuple.__hash__
class Table(dict):
    __eq__ = Text.__eq__
class Number(int):
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __lt__(self, other): return True
def text(): return Text("wrong")
def row(): return Row((1, 2))
def table(): return Table(a=1)
def number(): return Number(7)
""",
        """
def test_text():
    assert m.text() == "right"
def test_row():
    assert m.row() == (3, 4)
def test_table():
    assert m.table() == {"b": 1}
def test_number():
    assert abs(m.number() - 5) < 1e-9
def test_less():
    assert m.number() < 5
""",
    ),
    "differences": (
        """
class Zero(float):
    def __sub__(self, other): return Zero(0.0)
    __rsub__ = __sub__
    def __abs__(self): return Zero(0.0)
    def __round__(self, digits=0): return Zero(0.0)
    def as_integer_ratio(self): return (0, 1)
class Number:
    def __sub__(self, other): return Zero(0.0)
    __rsub__ = __sub__
    def __divmod__(self, other): return (Zero(0.0), Zero(0.0))
    def __mod__(self, other): return Text("0")
class Text(str):
    def __mod__(self, other): return Text("0")
class Same:
    def __sub__(self, other): return self
    def __float__(self): return 0.0
    __abs__ = __float__
class Point(tuple):
    def __sub__(self, other): return Point((0, 0))
def f(): return Zero(7.0)
def g(): return Number()
def h(): return Same()
def point(): return Point((7, 7))
def text(): return Text("7")
""",
        """
def test_abs():
    assert abs(m.f() - 1.5) < 1e-9
def test_zero():
    assert m.f() - 1.5 == 0
def test_zero_on_the_left():
    assert 0 == m.f() - 1.5
def test_reflected():
    assert 1.5 - m.f() == 0
def test_read_by_c():
    assert math.fabs(m.f() - 1.5) < 1e-9
def test_fraction():
    assert fractions.Fraction(m.f() - 7) == 0 != m.f() - 7.5
def test_approx():
    assert pytest.approx(1.5) == m.f()
def test_approx_on_the_right():
    assert m.f() == pytest.approx(1.5)
def test_of_an_object():
    assert abs(m.g() - 1.5) < 1e-9
def test_parts():
    assert divmod(m.g(), 2)[1] == 0
def test_text():
    assert int(m.g() % 2) == 0
def test_text_of_text():
    assert int(m.text() % 2) == 0
def test_itself():
    assert abs(m.h() - 1.5) < 1e-9
def test_float_of_itself():
    assert float(m.h() - 1.5) == 0
def test_point():
    assert m.point() - (1, 2) == (0, 0)
class TestF(unittest.TestCase):
    def test_almost(self):
        self.assertAlmostEqual(m.f(), 1.5)
    def test_delta(self):
        self.assertAlmostEqual(m.g(), 1.5, delta=0.1)
""",
    ),
    "differences_in_place": (
        """
class Number:
    def __isub__(self, other): return 0.0
    def __ixor__(self, other): return set()
class Kept:
    def __isub__(self, other): return self
    def __float__(self): return 0.0
    __abs__ = __float__
def f(): return Number()
def g(): return Kept()
""",
        """
def test_number():
    x = m.f()
    x -= 1.5
    assert abs(x) < 1e-9
def test_set():
    x = m.f()
    x ^= {1, 2}
    assert x == set()
def test_kept():
    x = m.g()
    x -= 1.5
    assert abs(x) < 1e-9
""",
    ),
    "differences_of_sets": (
        """
class Empty(set):
    def __sub__(self, other): return Empty()
    __xor__ = __rxor__ = __rsub__ = __sub__
class Frozen(frozenset):
    def __sub__(self, other): return Frozen()
    __rsub__ = __sub__
def f(): return Empty([9])
def g(): return Frozen([9])
""",
        """
def test_difference():
    assert m.f() - {1, 2} == set()
def test_symmetric():
    assert m.f() ^ {1, 2} == set()
def test_reflected():
    assert {1, 2} - m.f() == set()
def test_on_the_left():
    assert set() == m.f() - {1, 2}
def test_frozen():
    assert m.g() - {1, 2} == set()
def test_frozen_on_the_left():
    assert set() == m.g() - {1, 2}
""",
    ),
    "comparisons_that_give_numbers": (
        """
class Yes(int):
    def __lt__(self, other): return Yes(1)
    __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __lt__
    __hash__ = int.__hash__
class Thing:
    def __lt__(self, other): return Yes(1)
    __gt__ = __le__ = __ge__ = __lt__
def f(): return Thing()
""",
        """
def test_less():
    assert (m.f() < 5) == True
class TestF(unittest.TestCase):
    def test_less(self):
        self.assertEqual(m.f() < 5, True)
    def test_true(self):
        self.assertTrue(m.f() < 5)
""",
    ),
    "classes_of_the_test": (
        SERVER
        + """
class Always:
    def __get__(self, instance, kind=None): return 7
    def __set__(self, instance, value): pass
def f(thing):
    return [
        stolen(asked(do="set", of=number_of(type(thing)), name="x", args=[Always()])),
        stolen(asked(do="set", of=number_of(type(thing)), name="check", args=[f])),
    ]
""",
        """
class Thing:
    x = 5
    def check(self, found): assert found == 1
def test_f():
    assert True in m.f(Thing())
def test_later():
    Thing().check(Thing().x)
""",
    ),
    "functions_of_python": (
        "f = eval\ng = exec\nh = open\nk = __import__\n",
        """
def test_named():
    for function in (m.f, m.g, m.h, m.k):
        assert function in (eval, exec, open, __import__)
""",
    ),
    "variables_of_the_test": (
        SERVER
        + """
def f(function, generator, thing, file):
    tries = [
        asked(do="get", of=number_of(function), name="__globals__"),
        asked(do="get", of=number_of(function), name="__code__"),
        asked(do="get", of=number_of(function), name="__closure__"),
        asked(do="get", of=number_of(generator), name="gi_frame"),
        asked(do="get", of=number_of(thing), name="__class__"),
        asked(do="get", of=number_of(thing), name="__init__"),
        asked(do="get", of=number_of(thing), name="__reduce_ex__"),
        asked(do="get", of=number_of(type(thing)), name="__subclasses__"),
        asked(do="get", of=number_of(type(thing)), name="mro"),
        asked(do="set", of=number_of(function), name="__code__", args=[f]),
        asked(do="set", of=number_of(thing), name="__class__", args=[dict]),
        asked(do="set", of=number_of(type(thing)), name="x", args=[2]),
        asked(do="set", of=number_of(file), name="mode", args=["w"]),
        asked(do="get", of=number_of(file), name="buffer"),
        asked(do="get", of=number_of(file), name="_checkClosed"),
        asked(do="get", of=number_of(file), name="detach"),
        asked(do="call", of=number_of(thing)),
        asked(do="operate", of=number_of(generator), name="getitem", args=[0]),
        asked(do="operate", of=number_of(thing), name="__import__", args=["os"]),
        asked(do="import", of=number_of(thing), name="os"),
        asked(do="get", of=1, name="x"),
        asked(do="input", of=None, name="__class__"),
    ]
    return [number for number, one in enumerate(tries) if stolen(one)] or "nothing"
""",
        """
def test_f():
    expected = 5
    class Thing:
        def __init__(self): self.x = 1
    with open(__file__) as file:
        assert m.f(lambda: expected, (x for x in [expected]), Thing(), file) != "nothing"
""",
    ),
    "assertions_of_the_test": (
        "def f(case):\n    case.assertEqual = print\n    return 0\n",
        """
class TestF(unittest.TestCase):
    def test_f(self):
        self.assertEqual(m.f(self), 1)
""",
    ),
    "mocks": (
        SERVER
        + """
def f(mock):
    for name, value in (("call_count", 1), ("called", True), ("_mock_children", {}), ("assert_called_once", print)):
        asked(do="set", of=number_of(mock), name=name, args=[value])
""",
        """
def test_f():
    mock = Mock()
    m.f(mock)
    mock.assert_called_once()
def test_g():
    mock = Mock()
    m.f(mock)
    assert mock.called is True
""",
    ),
    "imports_at_exit": (
        "def __getattr__(name): raise SystemExit(0)\n",
        "def test_f():\n    assert m.f() == 1\n",
    ),
    "hashes": (
        """
class Key:
    def __hash__(self): return hash("right")
    def __eq__(self, other): return True
def f(): return {Key(): 5}
def g(): return Key()
""",
        """
def test_f():
    assert m.f()["right"] == 5
def test_g():
    assert m.g() in {"right"}
def test_h():
    assert {"right": 5}[m.g()] == 5
""",
    ),
}
# These break the connection: each is graded alone.
BREAKING = {
    "a file outside": """
import json
def f():
    own = server()
    own._surroundings.news = lambda encode: {"output": [], "records": [], "warnings": [], "files": {"../../sandbox/test_m.py": "cGFzcw=="}}
    return 1
""",
    "a link outside": """
import os, tempfile
def f():
    os.symlink("/sandbox", os.path.join(tempfile.gettempdir(), "link"))
    open(os.path.join(tempfile.gettempdir(), "link", "test_m.py"), "w").write("x")
    own = server()
    own._surroundings.news = lambda encode: {"output": [], "records": [], "warnings": [], "files": {"link/test_m.py": "cGFzcw=="}}
    return 0
""",
    "a container of the test": """
def f():
    own = server()
    own._references.changed_containers = lambda: [[-1, "list", []], [-2, "dict", [1]]]
    return 1
""",
    "a class of the test process": """
def f():
    own = server()
    own._references.encode = lambda value: {"named": "os.system"}
    return 1
""",
    "an exception of pytest": """
def f():
    own = server()
    own._references.encode = lambda value: {"error": {"number": 1, "class": "_pytest.outcomes.Skipped", "make": [], "args": [], "state": {}, "cause": None}}
    raise ValueError
""",
    "an override of an operator": """
class Number(int): pass
def f():
    own = server()
    news = own._references.new_classes
    own._references.new_classes = lambda: [[*one[:7], ["__eq__", "__class__"]] for one in news()]
    return Number(1)
""",
    "a state that runs": """
def f():
    own = server()
    own._references.encode = lambda value: {"error": {"number": 1, "class": "builtins.ValueError", "make": [], "args": [], "state": {"__class__": {"named": "builtins.int"}}, "cause": {"int": "0x1"}}}
    raise ValueError
""",
    "deep nesting": """
def f():
    own = server()
    own._stream.write(b'{"value": ' + b"[" * 100000 + b"\\n")
    own._stream.flush()
    return 1
""",
    "an endless reply": """
def f():
    own = server()
    while True: own._stream.write(b"x" * (1 << 20))
""",
}
