//! Finds the declarations of a CUDA C++ file and blanks those that are host code. Newlines stay, so that line
//! numbers do not change. Preprocessor directives stay, so that `#if` and `#endif` remain balanced.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use super::Parameter;

/// Specifiers that mark code or data of the device.
const DEVICE: [&str; 5] = ["__global__", "__device__", "__constant__", "__shared__", "__managed__"];

/// Words that occur in host code only. A function that has one of these words and no specifier is host code.
const HOST: [&str; 5] = ["<<<", "std::vector", "std::string", "std::cout", "std::cerr"];

/// Names that occur in host code only.
const HOST_NAMES: [&str; 18] = [
    "fprintf",
    "fopen",
    "exit",
    "EXIT_FAILURE",
    "EXIT_SUCCESS",
    "rand",
    "srand",
    "RAND_MAX",
    "getenv",
    "argv",
    "cudaError_t",
    "cudaStream_t",
    "strlen",
    "strcmp",
    "strchr",
    "strcpy",
    "strncasecmp",
    "sscanf",
];

/// Prefixes of names from host libraries.
const HOST_PREFIXES: [&str; 17] = [
    "cudaMalloc",
    "cudaMemcpy",
    "cudaMemset",
    "cudaFree",
    "cudaEvent",
    "cudaStream",
    "cudaDevice",
    "cudaGet",
    "cudaSet",
    "cudaFunc",
    "cublas",
    "cudnn",
    "curandCreate",
    "nccl",
    "cudaOccupancy",
    "cudaLaunch",
    "cuTensorMap",
];

/// A file that a text includes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Include {
    pub name: String,
    /// In quotes: the folder of the including file is searched first.
    pub is_quoted: bool,
}

/// A source text and its declarations.
#[derive(Clone, Debug)]
pub(super) struct Text {
    /// The text, in which host code is overwritten with spaces.
    bytes: Vec<u8>,
    /// The text with comments, literals and directives blanked: only code and newlines remain.
    code: Vec<u8>,
    declarations: Vec<Range<usize>>,
    /// Names of `#include "…"` and `#include <…>`.
    includes: Vec<Include>,
    blanked: Vec<Range<usize>>,
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.bytes))
    }
}

impl Text {
    pub fn new(text: &str) -> Text {
        let code = code_of(text.as_bytes());
        let declarations = declarations(&code);
        let includes = text.lines().filter_map(included).collect();
        Text { bytes: text.as_bytes().to_vec(), code, declarations, includes, blanked: Vec::new() }
    }

    pub fn includes(&self) -> impl Iterator<Item = &Include> {
        self.includes.iter()
    }

    /// The text, in which `path` states anew what some directives include.
    pub fn with_includes(&self, path: impl Fn(&Include) -> Option<PathBuf>) -> String {
        let text = self.to_string();
        let lines = text.split_inclusive('\n').map(|line| match included(line).and_then(|i| path(&i)) {
            Some(path) => format!("#include \"{}\"\n", path.display()),
            None => line.to_owned(),
        });
        lines.collect()
    }

    fn code(&self, range: &Range<usize>) -> &str {
        std::str::from_utf8(&self.code[range.clone()]).unwrap_or("")
    }

    fn has_device_code(&self, range: &Range<usize>) -> bool {
        let code = self.code(range);
        DEVICE.iter().any(|mark| code.contains(mark))
    }

    /// Blanks functions that are certainly host code: `main`, `__host__` functions, and functions that launch
    /// kernels or call the CUDA runtime.
    pub fn blank_host_functions(&mut self) {
        let host = |range: &Range<usize>| {
            let code = self.code(range);
            let head = code.split('{').next().unwrap_or("");
            let is_main = words(head).any(|word| word == "main") && head.contains('(');
            let is_function = code.contains('{') && head.contains('(');
            !self.has_device_code(range)
                && (is_main || is_function && (head.contains("__host__") || is_for_the_host(code)))
        };
        let found: Vec<Range<usize>> =
            self.declarations.iter().filter(|range| host(range)).cloned().collect();
        found.into_iter().for_each(|range| self.blank(range));
    }

    /// Blanks the declaration on a line (from 1) if it has no device specifier. Returns whether the
    /// declaration had any text.
    pub fn blank_line(&mut self, line: usize) -> bool {
        let Some(span) = lines(&self.code).nth(line.saturating_sub(1)) else { return false };
        let overlaps = |range: &&Range<usize>| range.start < span.end && span.start < range.end;
        let found: Vec<Range<usize>> = self
            .declarations
            .iter()
            .filter(overlaps)
            .filter(|range| !self.has_device_code(range) && !self.blanked.contains(range))
            .cloned()
            .collect();
        let any = !found.is_empty();
        found.into_iter().for_each(|range| self.blank(range));
        any
    }

    fn blank(&mut self, range: Range<usize>) {
        let mut is_directive = false;
        let ranges: Vec<Range<usize>> = lines(&self.bytes).collect();
        for line in ranges {
            let text = &self.bytes[line.clone()];
            is_directive |= text.trim_ascii_start().starts_with(b"#");
            let continues = text.trim_ascii_end().ends_with(b"\\");
            if !is_directive {
                let (start, end) = (line.start.max(range.start), line.end.min(range.end));
                if start < end {
                    self.bytes[start..end]
                        .iter_mut()
                        .filter(|byte| **byte != b'\n')
                        .for_each(|byte| *byte = b' ');
                }
            }
            is_directive &= continues;
        }
        self.blanked.push(range);
    }

    /// The first and the last line of each blanked declaration.
    pub fn blanked_lines(&self) -> Vec<(usize, usize)> {
        let line = |at: usize| 1 + self.code[..at].iter().filter(|byte| **byte == b'\n').count();
        let mut all: Vec<_> =
            self.blanked.iter().map(|range| (line(range.start), line(range.end.saturating_sub(1)))).collect();
        all.sort_unstable();
        all
    }

    /// The names of kernels that are function templates.
    pub fn template_kernels(&self) -> Vec<String> {
        let kernels = self.declarations.iter().filter_map(|range| {
            let code = self.code(range).trim_start();
            if !code.starts_with("template") || !code.contains("__global__") {
                return None;
            }
            let head = code.split_once("__global__")?.1;
            let head = skip_bounds(head).split('(').next()?;
            words(head).last().map(str::to_owned)
        });
        kernels.collect()
    }

    /// The parameters of the kernel with this name. `arguments` are those of its template instance.
    pub fn parameters_of(&self, kernel: &str, arguments: &[String]) -> Option<Vec<Parameter>> {
        let (template, list) = self.declared(kernel)?;
        let list = &list[1..closing(list.as_bytes(), 0)];
        let names = template.iter().filter_map(|declared| words(declared.split('=').next()?).last());
        let instance: BTreeMap<&str, &str> = names.zip(arguments.iter().map(String::as_str)).collect();
        Some(separated(list).iter().filter_map(|text| parameter(text, &instance)).collect())
    }

    /// An instance of the template of the kernel with this name: float for each type, 16 for each number.
    pub fn example_of(&self, kernel: &str) -> Option<String> {
        let (template, _) = self.declared(kernel)?;
        let needed = template.iter().take_while(|declared| !declared.contains('='));
        let arguments = needed.map(|declared| match words(declared).next() {
            Some("typename" | "class") => "float",
            Some("bool") => "true",
            _ => "16",
        });
        Some(format!("{kernel}<{}>", arguments.collect::<Vec<_>>().join(", ")))
    }

    /// The template parameters of the kernel with this name, and its code from the list of its parameters on.
    fn declared(&self, kernel: &str) -> Option<(Vec<String>, &str)> {
        let (before, list) = self.declarations.iter().find_map(|range| {
            let (before, head) = self.code(range).split_once("__global__")?;
            let head = skip_bounds(head);
            let open = head.find('(')?;
            (words(&head[..open]).last() == Some(kernel)).then_some((before, &head[open..]))
        })?;
        let template = before.split_once("template").map_or("", |(_, rest)| rest);
        let template = template.trim().trim_start_matches('<').trim_end().trim_end_matches('>');
        Some((separated(template), list))
    }

    /// The template instances that are launched: `name<…>` before `<<<`.
    pub fn launched_instances(&self) -> Vec<String> {
        let whole = 0..self.code.len();
        let code = self.code(&whole);
        let instances = code.match_indices("<<<").filter_map(|(at, _)| {
            let before = code[..at].trim_end();
            if !before.ends_with('>') {
                return None;
            }
            let mut depth = 0;
            let open = before.char_indices().rev().find(|(_, c)| {
                depth += i32::from(*c == '>') - i32::from(*c == '<');
                depth == 0
            })?;
            let name = before[..open.0].trim_end();
            let start =
                name.rfind(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).map_or(0, |at| at + 1);
            Some(format!("{}{}", &name[start..], &before[open.0..]))
        });
        instances.collect()
    }
}

/// The header that an `#include` line names. `None` for every other line.
fn included(line: &str) -> Option<Include> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
    let quoted = rest.strip_prefix('"').and_then(|rest| rest.split_once('"'));
    let (name, _) = quoted.or_else(|| rest.strip_prefix('<')?.split_once('>'))?;
    Some(Include { name: name.to_owned(), is_quoted: quoted.is_some() })
}

/// Qualifiers that are no part of a parameter's type.
const QUALIFIERS: [&str; 7] =
    ["const", "volatile", "__restrict__", "__restrict", "restrict", "__grid_constant__", "struct"];

/// The parts of a list between commas outside brackets, trimmed. An empty list has none.
pub(super) fn separated(list: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in list.chars() {
        depth +=
            i32::from(matches!(c, '<' | '(' | '[' | '{')) - i32::from(matches!(c, '>' | ')' | ']' | '}'));
        match (c, parts.last_mut()) {
            (',', _) if depth == 0 => parts.push(String::new()),
            (c, Some(part)) => part.push(c),
            (_, None) => {}
        }
    }
    parts
        .iter()
        .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|p| !p.is_empty())
        .collect()
}

/// A parameter from its declaration. `instance` has the arguments of the template by name.
fn parameter(text: &str, instance: &BTreeMap<&str, &str>) -> Option<Parameter> {
    let declared = text.split('=').next()?.trim();
    let (declared, is_array) =
        declared.split_once('[').map_or((declared, false), |(head, _)| (head.trim(), true));
    let start = declared.rfind(|c: char| !(c.is_alphanumeric() || c == '_')).map_or(0, |at| at + 1);
    let (ty, name) = declared.split_at(start);
    let pointers = ty.matches('*').count() + usize::from(is_array);
    let plain = ty.replace(['*', '&'], " ");
    let parts = plain.split_whitespace().filter(|word| !QUALIFIERS.contains(word));
    let parts = parts.map(|word| instance.get(word).copied().unwrap_or(word)).collect::<Vec<_>>().join(" ");
    (!name.is_empty() && !parts.is_empty()).then(|| Parameter {
        name: name.to_owned(),
        ty: parts + &"*".repeat(pointers),
        text: text.to_owned(),
    })
}

/// The text after `__launch_bounds__(…)` or a similar attribute, if the text begins with one.
fn skip_bounds(head: &str) -> &str {
    match head.split_once("__launch_bounds__") {
        Some((_, rest)) => rest.split_once(')').map_or(rest, |(_, rest)| rest),
        None => head,
    }
}

/// Whether code uses a word or a name that occurs in host code only.
fn is_for_the_host(code: &str) -> bool {
    let host = |word: &str| {
        HOST_NAMES.contains(&word) || HOST_PREFIXES.iter().any(|prefix| word.starts_with(prefix))
    };
    HOST.iter().any(|part| code.contains(part)) || words(code).any(host)
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The byte ranges of lines, without their newlines.
fn lines(bytes: &[u8]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut start = 0;
    bytes.split(|byte| *byte == b'\n').map(move |line| {
        let range = start..start + line.len();
        start = range.end + 1;
        range
    })
}

/// The errors in a compiler log, `file(line): error: message`: file, line and message.
pub(super) fn faults(log: &str) -> Vec<(PathBuf, usize, &str)> {
    let faults = log.lines().filter_map(|line| {
        let (place, message) =
            line.split_once("): error").or_else(|| line.split_once("): catastrophic error"))?;
        let (file, number) = place.rsplit_once('(')?;
        Some((PathBuf::from(file), number.parse().ok()?, message))
    });
    faults.collect()
}

/// The text with comments, literals and directives replaced by spaces.
fn code_of(text: &[u8]) -> Vec<u8> {
    let mut code = text.to_vec();
    let mut at = 0;
    let mut line_begins = true;
    while at < text.len() {
        let rest = &text[at..];
        let end = if rest.starts_with(b"//") {
            at + line_end(rest)
        } else if rest.starts_with(b"/*") {
            rest.windows(2).skip(2).position(|two| two == b"*/").map_or(text.len(), |found| at + found + 4)
        } else if rest.starts_with(b"R\"") {
            raw_end(rest).map_or(text.len(), |found| at + found)
        } else if matches!(rest[0], b'"' | b'\'')
            && !(rest[0] == b'\'' && at > 0 && text[at - 1].is_ascii_hexdigit())
        {
            at + literal_end(rest)
        } else if rest[0] == b'#' && line_begins {
            at + line_end(rest)
        } else {
            line_begins = rest[0] == b'\n' || line_begins && rest[0].is_ascii_whitespace();
            at += 1;
            continue;
        };
        code[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at = end;
    }
    code
}

/// The end of a logical line: `\` at the end of a line joins the next one.
fn line_end(text: &[u8]) -> usize {
    let ends = |at: &usize| text[*at] == b'\n' && !text[..*at].trim_ascii_end().ends_with(b"\\");
    (0..text.len()).find(ends).unwrap_or(text.len())
}

/// The end of a literal in quotes.
fn literal_end(text: &[u8]) -> usize {
    let mut escaped = false;
    for (at, &byte) in text.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'\n' => return at,
            byte if byte == text[0] => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The end of `R"tag(…)tag"`.
fn raw_end(text: &[u8]) -> Option<usize> {
    let open = text.iter().position(|&byte| byte == b'(')?;
    let close = [b")", &text[2..open], b"\""].concat();
    text.windows(close.len()).position(|part| part == close).map(|at| at + close.len())
}

/// The declarations at file and namespace level, each from its first to its last character.
fn declarations(code: &[u8]) -> Vec<Range<usize>> {
    let mut all = Vec::new();
    let mut start: Option<usize> = None;
    let mut at = 0;
    while at < code.len() {
        match code[at] {
            byte if byte.is_ascii_whitespace() => {}
            // The end of a namespace.
            b'}' => start = None,
            b';' => all.extend(start.take().map(|start| start..at + 1)),
            b'{' => {
                let head = String::from_utf8_lossy(&code[start.unwrap_or(at)..at]).into_owned();
                if is_namespace(&head) {
                    start = None;
                } else {
                    at = closing(code, at);
                    if !goes_on(&head) {
                        all.extend(start.take().map(|start| start..(at + 1).min(code.len())));
                    }
                }
            }
            b'(' | b'[' => {
                start = start.or(Some(at));
                at = closing(code, at);
            }
            _ => start = start.or(Some(at)),
        }
        at += 1;
    }
    all.extend(start.map(|start| start..code.len()));
    all
}

/// Whether this text before a `{` opens a namespace or an `extern "C"` block.
fn is_namespace(head: &str) -> bool {
    // The literal of `extern "C"` is blanked.
    words(head).any(|word| word == "namespace") && !head.contains('(') || head.trim() == "extern"
}

/// Whether a declaration continues after its closing brace, up to a semicolon.
fn goes_on(head: &str) -> bool {
    let is_type = words(head).any(|word| matches!(word, "struct" | "class" | "union" | "enum" | "typedef"));
    // An `=` inside parentheses is a default argument, not an initialiser.
    let mut depth = 0;
    let is_initialised = head.chars().any(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == '=' && depth == 0
    });
    is_type && !head.contains('(')
        || is_initialised && !head.contains("operator") && !head.contains("template")
}

/// The position of the bracket that closes the one at `open`, or the end of the text.
fn closing(code: &[u8], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in code.iter().enumerate().skip(open) {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"#include "mine.cuh" // #include <none.h>
#define N 4 /* { */
// main() {
struct Both { float x; };
namespace a {
template <typename T, int M> __global__ void __launch_bounds__(64) scale(T* x) { x[0] *= M; }
static int host(int n) { return n; }
}
static void defaults(float* x, float y = 1.0f) { exit(1); }
extern "C" __global__ void plain(float* x) { if (x[0] > '{') { x[0] = 1; } }
void run(float* x) {
#ifdef TWICE
    a::scale<float, 2><<<1, 64>>>(x);
#endif
    plain<<<1, 32>>>(x);
}
int main(int argc, char** argv) {
    return host(N);
}
"#;

    #[test]
    fn parameters_are_those_of_the_source() {
        let source = "template <typename T, int N = 4, class Acc = float>\n__global__ void __launch_bounds__(64)\n\
                      scale(const T* __restrict__ x, /* out, */ T *y, unsigned int n, const Acc alpha, int table[], \
                      std::array<int, 2> pair) {}\nextern \"C\" __global__ void none() {}";
        let source = [super::super::Source { file: "k.cu".into(), text: source.to_owned() }];
        let of = |kernel: &str| {
            let all = super::super::parameters(&source, kernel)?;
            Some(all.into_iter().map(|p| (p.name, p.ty)).collect::<Vec<_>>())
        };
        let expected = [
            ("x", "__half*"),
            ("y", "__half*"),
            ("n", "unsigned int"),
            ("alpha", "double"),
            ("table", "int*"),
            ("pair", "std::array<int, 2>"),
        ];
        let expected: Vec<_> = expected.map(|(name, ty)| (name.to_owned(), ty.to_owned())).to_vec();
        assert_eq!(of("a::scale<__half, 2, double>"), Some(expected));
        assert_eq!(of("scale").unwrap()[0], ("x".to_owned(), "T*".to_owned()));
        assert_eq!(of("none"), Some(Vec::new()));
        assert_eq!(of("other"), None);
    }

    #[test]
    fn host_functions_go_and_lines_stay() {
        let mut text = Text::new(FILE);
        text.blank_host_functions();
        let blanked = text.to_string();
        assert_eq!(blanked.lines().count(), FILE.lines().count());
        assert!(!blanked.contains("<<<") && !blanked.contains("argc"), "{blanked}");
        for kept in
            ["plain(float* x)", "static int host", "#ifdef TWICE", "#endif", "struct Both", "#define N"]
        {
            assert!(blanked.contains(kept), "{kept}: {blanked}");
        }
        assert_eq!(text.blanked_lines(), [(9, 9), (11, 16), (17, 19)]);
        assert!(text.blank_line(7) && !text.blank_line(7) && !text.blank_line(6), "device code stays");
        assert!(!text.to_string().contains("static int host"));
        let include = |name: &str, is_quoted| Include { name: name.to_owned(), is_quoted };
        assert_eq!(text.includes, [include("mine.cuh", true)]);
        let text = Text::new("# include <their.h>\nint x;\n#include \"no.h\"");
        assert_eq!(text.includes, [include("their.h", false), include("no.h", true)]);
        let path = |include: &Include| (include.name != "no.h").then(|| PathBuf::from("a/their.h"));
        assert_eq!(text.with_includes(path), "#include \"a/their.h\"\nint x;\n#include \"no.h\"");
    }

    #[test]
    fn templates_and_their_launches_are_found() {
        let text = Text::new(FILE);
        assert_eq!(text.template_kernels(), ["scale"]);
        assert_eq!(text.launched_instances(), ["a::scale<float, 2>"]);
        assert_eq!(text.example_of("scale").as_deref(), Some("scale<float, 16>"));
        let text = Text::new(
            "template <class A, bool B, unsigned N, typename C = A>\n__global__ void f(A* x, C y) {}\n",
        );
        assert_eq!(text.example_of("f").as_deref(), Some("f<float, true, 16>"));
    }

    #[test]
    fn errors_name_their_places() {
        let log = "a.cu(7): error: x\n  y\nsrc/b.cuh(12): catastrophic error: z\na.cu(3): warning #1: w\n";
        let wanted = [(PathBuf::from("a.cu"), 7, ": x"), (PathBuf::from("src/b.cuh"), 12, ": z")];
        assert_eq!(faults(log), wanted);
    }
}
