//! Reads line information: the source lines that a PTX text was compiled from.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::lexer::{self, Kind, Token};
use crate::Name;

/// Maximum number of bytes in the name of an inlined function. Longer names are cut, so that labels that
/// overlap in `.debug_str` cannot take quadratic memory.
const LONGEST_NAME: usize = 4096;

/// Maximum number of frames of one instruction.
const MOST_FRAMES: usize = 64;

/// The source lines of a PTX text, from its `.file` and `.loc` directives (PTX ISA, "Debugging Directives").
///
/// [`parse`](crate::parse()) drops these directives, because the code does not depend on them. An instruction
/// keeps its line in the PTX text ([`Instruction::line`](crate::Instruction::line)), and this table maps such
/// a line to the source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineTable {
    /// File names by their numbers in `.file`.
    files: BTreeMap<u32, String>,
    /// The functions of the text and the inlined functions.
    functions: Vec<Name>,
    /// The `.loc` directives with a line, in the order of the text.
    places: Vec<Place>,
    /// From these PTX lines on, in increasing order: the PTX function, and the place in it.
    marks: Vec<Mark>,
}

/// One `.loc` directive.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    file: u32,
    line: u32,
    column: u32,
    /// The inlined function that the line belongs to, an index of `functions`.
    function: Option<usize>,
    /// The place of the call that was inlined, an index of `places` that is smaller than this one's.
    caller: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    line: u32,
    function: Option<usize>,
    place: Option<usize>,
}

/// A line of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFrame<'t> {
    /// The file, as `.file` names it.
    pub file: &'t str,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1; 0 if it is not known.
    pub column: u32,
    /// The mangled name of the function that contains the line.
    pub function: Option<&'t str>,
}

impl LineTable {
    /// Reads the line information of a PTX text. A text without such information, or one that is not PTX,
    /// gives an empty table. Takes linear time.
    pub fn of(text: &str) -> LineTable {
        let tokens =
            if u32::try_from(text.len()).is_ok() { lexer::tokens(text) } else { return Self::default() };
        tokens.map_or_else(|_| LineTable::default(), |tokens| Reader::new(text, &tokens).table())
    }

    /// Whether no PTX line has a source line.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The names of all source files, as `.file` gives them.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.values().map(String::as_str)
    }

    /// The source line of a PTX line, then the calls through which it was inlined, from the inside out. Empty
    /// if the PTX line has no source line.
    pub fn frames(&self, ptx_line: u32) -> Vec<SourceFrame<'_>> {
        let after = self.marks.partition_point(|mark| mark.line <= ptx_line);
        let Some(mark) = after.checked_sub(1).map(|at| self.marks[at]) else { return Vec::new() };
        let mut frames = Vec::new();
        let mut next = mark.place;
        while let Some(place) = next.filter(|_| frames.len() < MOST_FRAMES).map(|at| &self.places[at]) {
            next = place.caller;
            let Some(file) = self.files.get(&place.file) else { continue };
            let function = place.function.or(mark.function.filter(|_| next.is_none()));
            let function = function.map(|at| &*self.functions[at]);
            frames.push(SourceFrame { file, line: place.line, column: place.column, function });
        }
        frames
    }
}

/// The lines of each inline assembly, which compilers mark by comments.
fn assembly(text: &str) -> Vec<Range<u32>> {
    let (mut all, mut start) = (Vec::new(), None);
    for (line, number) in text.lines().zip(1..) {
        match line.trim() {
            "// begin inline asm" => start = Some(number),
            "// end inline asm" => all.extend(start.take().map(|start| start..number)),
            _ => {}
        }
    }
    all
}

/// The position in the tokens, and the table so far.
struct Reader<'t> {
    text: &'t str,
    tokens: &'t [Token],
    at: usize,
    table: LineTable,
    /// The newest place of each file, line and column in the current function.
    newest: HashMap<(u32, u32, u32), usize>,
    /// The label and offset in `.debug_str` of the inlined functions, with their places.
    inlined: Vec<(&'t str, usize, usize)>,
    /// The bytes of the debugging sections, and where labels are in them.
    strings: Vec<u8>,
    labels: HashMap<&'t str, usize>,
    /// The PTX lines of each inline assembly.
    assembly: Vec<Range<u32>>,
}

impl<'t> Reader<'t> {
    fn new(text: &'t str, tokens: &'t [Token]) -> Reader<'t> {
        Reader {
            text,
            tokens,
            at: 0,
            table: LineTable::default(),
            newest: HashMap::new(),
            inlined: Vec::new(),
            strings: Vec::new(),
            labels: HashMap::new(),
            assembly: assembly(text),
        }
    }

    fn table(mut self) -> LineTable {
        while self.kind() != Kind::End {
            let (word, line) = (self.word(), self.tokens[self.at].line);
            let directive = self.kind() == Kind::Dot;
            self.at += 1;
            match word {
                ".loc" if directive => self.place(line),
                ".file" if directive => self.file(),
                ".entry" | ".func" if directive => self.function(line),
                ".section" if directive => self.section(),
                _ => {}
            }
        }
        self.name_inlined();
        self.table
    }

    /// The kind of the next token. The last token is `End`.
    fn kind(&self) -> Kind {
        self.tokens.get(self.at).map_or(Kind::End, |token| token.kind)
    }

    fn word(&self) -> &'t str {
        self.tokens.get(self.at).map_or("", |token| &self.text[token.start as usize..token.end as usize])
    }

    /// Takes the next token if it is of this kind.
    fn take(&mut self, kind: Kind) -> Option<&'t str> {
        let word = self.word();
        (self.kind() == kind).then(|| self.at += 1).map(|()| word)
    }

    fn number<N: std::str::FromStr>(&mut self) -> Option<N> {
        self.take(Kind::Number)?.parse().ok()
    }

    fn eat(&mut self, c: u8) -> bool {
        self.take(Kind::Punct(c, 0)).is_some()
    }

    /// `file line column`
    fn position(&mut self) -> Option<(u32, u32, u32)> {
        Some((self.number()?, self.number()?, self.number().unwrap_or(0)))
    }

    /// `.loc file line column [, function_name label [+ offset]] [, inlined_at file line column]`
    fn place(&mut self, ptx_line: u32) {
        let Some((file, line, column)) = self.position() else { return };
        if self.is_inside_assembly(ptx_line) {
            return;
        }
        let (mut label, mut call) = (None, None);
        while self.eat(b',') {
            match self.take(Kind::Name) {
                Some("function_name") => {
                    let Some(name) = self.take(Kind::Name) else { return };
                    let offset = if self.eat(b'+') { self.number().unwrap_or(0) } else { 0 };
                    label = Some((name, offset));
                }
                Some("inlined_at") => call = self.position(),
                _ => return,
            }
        }
        // Line 0 marks code that belongs to no line.
        let place = (line > 0).then(|| {
            // The call is described by an earlier directive, which may itself be inlined.
            let caller = call.map(|call| self.caller(call));
            let at = self.table.places.len();
            self.table.places.push(Place { file, line, column, function: None, caller });
            self.newest.insert((file, line, column), at);
            self.inlined.extend(label.map(|(name, offset)| (name, offset, at)));
            at
        });
        let function = self.table.marks.last().and_then(|mark| mark.function);
        self.mark(Mark { line: ptx_line, function, place });
    }

    /// Whether a place is in the same inline assembly as an earlier one. Compilers based on LLVM (Triton)
    /// number the lines of the assembly consecutively, starting at the line of its statement.
    fn is_inside_assembly(&self, ptx_line: u32) -> bool {
        let at = self.assembly.partition_point(|lines| lines.end <= ptx_line);
        let around = self.assembly.get(at).filter(|lines| lines.contains(&ptx_line));
        around.is_some_and(|lines| self.table.marks.last().is_some_and(|mark| lines.contains(&mark.line)))
    }

    /// The place of a call. If no directive describes the call, its place has no caller.
    fn caller(&mut self, (file, line, column): (u32, u32, u32)) -> usize {
        let places = &mut self.table.places;
        *self.newest.entry((file, line, column)).or_insert_with(|| {
            places.push(Place { file, line, column, function: None, caller: None });
            places.len() - 1
        })
    }

    /// Adds a mark. It replaces an earlier mark of the same PTX line.
    fn mark(&mut self, mark: Mark) {
        match self.table.marks.last_mut() {
            Some(last) if last.line == mark.line => *last = mark,
            _ => self.table.marks.push(mark),
        }
    }

    /// `.file number "name" [, time, size]`, or `.file number "folder" "name"`.
    fn file(&mut self) {
        let (Some(number), Some(first)) = (self.number(), self.string()) else { return };
        let name = match self.string() {
            Some(second) if !second.starts_with('/') => format!("{first}/{second}"),
            Some(second) => second,
            None => first,
        };
        self.table.files.insert(number, name);
    }

    fn string(&mut self) -> Option<String> {
        let quoted = self.take(Kind::String)?;
        Some(quoted[1..quoted.len() - 1].replace("\\\\", "\\").replace("\\\"", "\""))
    }

    /// `.entry name`, or `.func (results) name`.
    fn function(&mut self, line: u32) {
        if self.eat(b'(') {
            while !matches!(self.kind(), Kind::Punct(b')', 0) | Kind::End) {
                self.at += 1;
            }
            self.eat(b')');
        }
        let Some(name) = self.take(Kind::Name) else { return };
        self.newest.clear();
        self.table.functions.push(name.into());
        self.mark(Mark { line, function: Some(self.table.functions.len() - 1), place: None });
    }

    /// `.section name { … }`: the bytes of `.debug_str` and its labels.
    fn section(&mut self) {
        let strings = self.take(Kind::Dot) == Some(".debug_str");
        while !matches!(self.kind(), Kind::Punct(b'}', 0) | Kind::End) {
            let (kind, word) = (self.kind(), self.word());
            self.at += 1;
            match kind {
                Kind::Name if strings && self.eat(b':') => {
                    self.labels.insert(word, self.strings.len());
                }
                Kind::Number if strings => self.strings.extend(word.parse::<u8>()),
                _ => {}
            }
        }
    }

    /// Sets the function names of inlined places. The text gives these names at its end.
    fn name_inlined(&mut self) {
        let mut known: HashMap<usize, usize> = HashMap::new();
        for (label, offset, place) in std::mem::take(&mut self.inlined) {
            let Some(start) = self.labels.get(label).and_then(|start| start.checked_add(offset)) else {
                continue;
            };
            let functions = &mut self.table.functions;
            let Some(bytes) = self.strings.get(start..) else { continue };
            let index = *known.entry(start).or_insert_with(|| {
                let name = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
                let name = String::from_utf8_lossy(&name[..name.len().min(LONGEST_NAME)]);
                functions.push(name.into());
                functions.len() - 1
            });
            self.table.places[place].function = Some(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = ".version 7.0
.target sm_80
.visible .entry _Z1kPf(.param .u64 a)
{
    .reg .b32 %r<4>;
    mov.u32 %r0, 0;
    .loc 1 12 5
    mov.u32 %r1, 1;
    .loc 1 13 5
    .loc 1 6 3, function_name $L__info_string0, inlined_at 1 13 5
    .loc 2 2 3, function_name $L__info_string0+15, inlined_at 1 6 3
    mov.u32 %r2,
        2;
    .loc 1 0 0
    mov.u32 %r3, 3;
    ret;
}
.func (.reg .b32 %r0) _Z3farv()
{
    mov.u32 %r0, 3;
    .loc 2 9 1
    ret;
}
    .file 1 \"/src/n.cu\"
    .file 2 \"/src\" \"inner.cuh\"
    .section .debug_str
    {
$L__info_string0:
.b8 95,90,53,111,117,116,101,114,80,102,105,0
.b8 95,90,53,105,110,110,101,114,80,102,105,0
    }
";

    fn shown(table: &LineTable, line: u32) -> Vec<String> {
        let frame =
            |f: SourceFrame| format!("{}:{}:{} {}", f.file, f.line, f.column, f.function.unwrap_or("?"));
        table.frames(line).into_iter().map(frame).collect()
    }

    #[test]
    fn a_ptx_line_has_its_source_line_and_the_calls_around_it() {
        let text = TEXT.replace("+15", "+12");
        let table = LineTable::of(&text);
        assert_eq!(shown(&table, 6), [""; 0]);
        assert_eq!(shown(&table, 8), ["/src/n.cu:12:5 _Z1kPf"]);
        let inlined =
            ["/src/inner.cuh:2:3 _Z5innerPfi", "/src/n.cu:6:3 _Z5outerPfi", "/src/n.cu:13:5 _Z1kPf"];
        assert_eq!(shown(&table, 12), inlined);
        assert_eq!(shown(&table, 13), inlined);
        assert_eq!(shown(&table, 15), [""; 0], "line 0 is no line");
        assert_eq!(shown(&table, 20), [""; 0], "a function begins without a line");
        assert_eq!(shown(&table, 22), ["/src/inner.cuh:9:1 _Z3farv"]);
        assert_eq!(table.files().collect::<Vec<_>>(), ["/src/n.cu", "/src/inner.cuh"]);
        assert!(!table.is_empty() && LineTable::of(".version 7.0\n.target sm_80\n").is_empty());
    }

    #[test]
    fn inline_assembly_has_one_line() {
        let text = ".visible .entry k()\n{\n.loc 1 7 3\n// begin inline asm\n.loc 1 7 3\nmov.u32 %r1, 0;\n\
                    .loc 1 8 3\nbar.sync 0;\n// end inline asm\n.loc 1 9 3\nret;\n}\n.file 1 \"a.py\"\n";
        let table = LineTable::of(text);
        let lines = [6, 8, 11].map(|line| shown(&table, line));
        assert_eq!(lines, [["a.py:7:3 k"], ["a.py:7:3 k"], ["a.py:9:3 k"]]);
    }

    #[test]
    fn damaged_directives_are_left_out() {
        // An offset into the middle of a name gives the rest of the name.
        assert_eq!(shown(&LineTable::of(TEXT), 12)[0], "/src/inner.cuh:2:3 innerPfi");
        for (whole, part) in [
            (".loc 1 12 5", ".loc"),
            (".loc 1 12 5", ".loc 1 99999999999 5"),
            (".file 1 \"/src/n.cu\"", ".file 1"),
            ("inlined_at 1 6 3", "inlined_at 7 7 7"),
            ("inlined_at 1 13 5", "inlined_at"),
            ("$L__info_string0:", "$L__other:"),
            ("    }\n", ""),
            ("\"inner.cuh\"", "\"inner"),
        ] {
            let table = LineTable::of(&TEXT.replacen(whole, part, 1));
            for line in 0..40 {
                assert!(table.frames(line).len() <= 3, "{part}");
            }
        }
        // Each place is inlined at the one before: the frames of an instruction stay few.
        let chain: String = (1..1000)
            .map(|n| format!(".loc 1 {} 1, function_name $f, inlined_at 1 {n} 1\n", n + 1))
            .collect();
        let table = LineTable::of(&format!(".entry k()\n{{\n{chain}}}\n.file 1 \"a.cu\"\n"));
        assert_eq!(table.frames(2000).len(), MOST_FRAMES);
    }
}
