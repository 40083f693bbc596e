'''Lines of comma-separated values, with quotes.

>>> parse_line("a,b,c")
['a', 'b', 'c']
>>> parse_line('x,"y,z",w')
['x', 'y,z', 'w']
>>> parse_line('"say ""hi""",2')
['say "hi"', '2']
>>> parse_line("")
['']
>>> parse_line("a,,b")
['a', '', 'b']
>>> parse_line('"open')
ValueError
>>> format_line(["a", "b,c", 'd"e'])
'a,"b,c","d""e"'
>>> format_line(["1", "2"])
'1,2'
>>> format_line([""])
''
>>> read_table("name,age\\nann,30\\nbob,25")
[{'name': 'ann', 'age': '30'}, {'name': 'bob', 'age': '25'}]
>>> read_table("name,age\\n\\nann,30\\n")
[{'name': 'ann', 'age': '30'}]
>>> read_table("a,b\\n1")
ValueError
>>> column(read_table("k,v\\nx,1\\ny,2"), "v")
['1', '2']
>>> column([], "v")
[]
'''


def parse_line(line):
    """The fields of a line; a quote inside quotes is doubled."""
    fields = []
    field = ""
    quoted = False
    i = 0
    while i < len(line):
        letter = line[i]
        if quoted and letter == '"' and line[i + 1 : i + 2] == '"':
            field += '"'
            i += 1
        elif letter == '"':
            quoted = not quoted
        elif letter == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += letter
        i += 1
    if quoted:
        raise ValueError("a quote is not closed")
    fields.append(field)
    return fields


def format_line(fields):
    """A line of fields; those with commas or quotes are quoted."""
    parts = []
    for field in fields:
        if "," in field or '"' in field:
            field = '"' + field.replace('"', '""') + '"'
        parts.append(field)
    return ",".join(parts)


def read_table(text):
    """The rows of a table, by the names in its first line; empty lines don't count."""
    lines = [line for line in text.split("\n") if line]
    names = parse_line(lines[0])
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = parse_line(line)
        if len(fields) != len(names):
            raise ValueError(f"line {number} has {len(fields)} fields, not {len(names)}")
        rows.append(dict(zip(names, fields, strict=True)))
    return rows


def column(rows, name):
    """The values of one column."""
    return [row[name] for row in rows]
