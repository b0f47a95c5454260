//! Tests that the tutorials of the book work as printed: files are saved under the names that the text gives,
//! commands run in order, and outputs are compared with those on the page.

use std::process::Command;

use crate::folder::{Folder, text};

/// A fenced block of a page: its language, the sentence before it, and its lines.
struct Block {
    language: String,
    before: String,
    body: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let (mut found, mut before, mut open): (Vec<Block>, String, Option<Block>) =
        (vec![], String::new(), None);
    for line in page.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(language)) => {
                let before = std::mem::take(&mut before);
                open = Some(Block { language: language.to_owned(), before, body: String::new() });
            }
            (Some(_), Some("")) => found.extend(open.take()),
            (Some(block), _) => block.body += &format!("{line}\n"),
            (None, None) if line.is_empty() => {}
            (None, None) => before = format!("{before} {line}"),
        }
    }
    found
}

/// The name in ``Save this as `name` ``.
fn file(before: &str) -> Option<&str> {
    before.rsplit_once("Save this as `")?.1.split('`').next()
}

/// Compilers that a machine may lack, by the words of the refusal.
const COMPILERS: [&str; 2] = ["CUDA C++ needs NVRTC", "a Triton kernel needs Triton"];

/// Runs the shell lines of a block and returns all that they print; `None` if the machine lacks the compiler.
/// A command that must fail says so by its exit code in the text after the block, so codes are those of the
/// last line only.
fn run(folder: &Folder, lines: &str) -> Option<String> {
    let mut said = String::new();
    for line in lines.lines() {
        // Two minutes of search are an example: the test searches for a second.
        let line = line.replace("--minutes 2", "--minutes 0.02");
        let bin = env!("CARGO_BIN_EXE_flashcore").rsplit_once('/').unwrap().0;
        let path = format!("{bin}:{}", std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell.args(["-c", &line]).current_dir(&folder.0).env("PATH", path);
        let output = shell.env("FLASHCORE_CONFIG_DIR", folder.0.join("config")).output().unwrap();
        let code = output.status.code();
        let error = text(&output.stderr);
        if code == Some(3) && COMPILERS.iter().any(|lacks| error.contains(lacks)) {
            filetest::not_run(error.trim());
            return None;
        }
        assert!(matches!(code, Some(0 | 1)), "{line}: {code:?} {error}");
        said += &text(&output.stdout);
    }
    Some(said)
}

/// Whether the lines of `page` occur in `said` in the same order. `…` matches any text.
fn holds(page: &str, said: &str) -> Result<(), String> {
    let mut rest = said;
    for part in page.split('…').flat_map(str::lines).map(str::trim).filter(|part| !part.is_empty()) {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return Err(format!("`{part}` is not in:\n{rest}")),
        }
    }
    Ok(())
}

fn follow(name: &str) {
    let page = std::fs::read_to_string(format!("../../docs/src/tutorial/{name}.md")).unwrap();
    let folder = Folder::new(&format!("tutorial-{name}"));
    let (mut said, mut compared) = (Some(String::new()), 0);
    for block in blocks(&page) {
        match (block.language.as_str(), file(&block.before)) {
            ("ptx" | "toml" | "cuda" | "python", Some(name)) => drop(folder.write(name, &block.body)),
            ("sh", _) => said = run(&folder, &block.body),
            ("text", _) => {
                let Some(said) = &said else { continue };
                holds(&block.body, said).unwrap_or_else(|why| panic!("{name}: {why}"));
                compared += 1;
            }
            (language, file) => panic!("{name}: a block of {language} that nobody runs ({file:?})"),
        }
    }
    assert!(compared >= 1, "{name}: {compared} outputs");
}

#[test]
fn check_my_kernel() {
    follow("check");
}

#[test]
fn make_my_kernel_faster() {
    follow("faster");
}

#[test]
fn an_output_that_differs_is_found() {
    assert!(holds("a\n…\nb …\n", "x a\nc\nb d\n").is_ok());
    assert!(holds("b\na\n", "a\nb\n").is_err() && holds("a …c", "a b\n").is_err());
}
