//! Text tests by purpose, each file one case (add `-- parse/mma` to run some).
//!
//! A file whose name starts with `cases_` holds several: a preamble, then cases, each after a line `//# name`. The preamble
//! stands before each, and a brace that it leaves open is closed behind it.
//!
//! - `filetests/parse/*.ptx` is read. A comment `// error: TEXT` on a line says that the parser stops at this line with a
//!   message that holds TEXT. A file without one must be read and verified, come back from the printer as the same module, and
//!   be taken by ptxas, as written and as printed.
//! - `filetests/verify/*.ptx` is read and verified. Each `// error: RULE: TEXT` on a line is a violation there, each
//!   `//! error: RULE: TEXT` one outside instructions; there must be no others.
//! - `filetests/emit/*.ptx` is read and printed, and the text is that of the `.out` file beside it (written anew when
//!   `FLASHCORE_BLESS` is set).

mod ptxas;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flashcore_ptx::{Module, Violation, parse};
use libtest_mimic::{Arguments, Failed, Trial};

/// An error that a file says will come.
#[derive(Debug)]
struct Expected {
    /// 0 outside instructions.
    line: u32,
    text: String,
}

impl Expected {
    fn fits(&self, line: u32, message: &str) -> bool {
        self.line == line && message.contains(&self.text)
    }
}

fn expected(text: &str) -> Vec<Expected> {
    let lines = text.lines().zip(1..);
    let found = lines.filter_map(|(line, number)| {
        let (number, text) = match line.split_once("//! error: ") {
            Some((_, text)) => (0, text),
            None => (number, line.split_once("// error: ")?.1),
        };
        Some(Expected { line: number, text: text.trim().to_owned() })
    });
    found.collect()
}

fn parse_text(text: &str, ptxas: Option<&Path>) -> Result<(), Failed> {
    match (expected(text).as_slice(), parse(text)) {
        ([], Ok(module)) => accepted(text, &module, ptxas),
        ([], Err(error)) => Err(error.to_string().into()),
        ([error, ..], Ok(_)) => Err(format!("was read, without {error:?}").into()),
        ([error, ..], Err(found)) => {
            if error.fits(found.line, &found.message) {
                return Ok(());
            }
            Err(format!("{error:?} was expected, and this came: {found}").into())
        }
    }
}

fn accepted(text: &str, module: &Module, ptxas: Option<&Path>) -> Result<(), Failed> {
    module.verify()?;
    let printed = module.to_string();
    let again = parse(&printed).map_err(|e| format!("printed text: {e}"))?;
    if again != *module {
        return Err(format!("the printed text reads back as another module:\n{printed}").into());
    }
    if again.to_string() != printed {
        return Err("printing is not stable".into());
    }
    if let Some(ptxas) = ptxas {
        ptxas::assemble(ptxas, text, module.target)?;
        ptxas::assemble(ptxas, &printed, module.target)?;
    }
    Ok(())
}

fn verify_file(path: &Path) -> Result<(), Failed> {
    let text = fs::read_to_string(path)?;
    let mut wanted = expected(&text);
    let module = parse(&text).map_err(|e| e.to_string())?;
    let found: Vec<Violation> = module.verify().map_or_else(|violations| violations.0, |_| Vec::new());
    for violation in found {
        let message = format!("{}: {}", violation.rule.name(), violation.message);
        match wanted.iter().position(|w| w.fits(violation.line, &message)) {
            Some(i) => drop(wanted.swap_remove(i)),
            None => return Err(format!("not expected: {violation}").into()),
        }
    }
    if wanted.is_empty() { Ok(()) } else { Err(format!("did not come: {wanted:?}").into()) }
}

fn emit_file(path: &Path) -> Result<(), Failed> {
    let text = fs::read_to_string(path)?;
    let printed = parse(&text).map_err(|e| e.to_string())?.to_string();
    let golden = path.with_extension("out");
    if std::env::var_os("FLASHCORE_BLESS").is_some() {
        fs::write(&golden, &printed)?;
    }
    if fs::read_to_string(&golden)? == printed {
        return Ok(());
    }
    Err(format!("{} is not what is printed now:\n{printed}", golden.display()).into())
}

fn files(purpose: &str) -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests").join(purpose);
    let entries = fs::read_dir(folder).expect("the filetests stand in the repository");
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    let named = |path: PathBuf| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        (format!("{purpose}/{stem}"), path)
    };
    let mut files: Vec<_> = paths.map(named).collect();
    files.sort();
    files
}

/// The cases of a file with their names.
fn cases(name: String, path: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(path).expect("a listed file can be read");
    let Some(group) = name.strip_prefix("parse/cases_") else { return vec![(name, text)] };
    let mut parts = text.split("//# ");
    let preamble = parts.next().unwrap_or_default();
    let open = preamble.matches('{').count() > preamble.matches('}').count();
    let close = if open { "}\n" } else { "" };
    let case = |part: &str| {
        let (title, body) = part.split_once('\n').unwrap_or((part, ""));
        (format!("parse/{group}/{}", title.trim()), format!("{preamble}{body}{close}"))
    };
    parts.map(case).collect()
}

fn main() {
    let arguments = Arguments::from_args();
    let ptxas = Arc::new(ptxas::find());
    let mut trials = Vec::new();
    for (name, path) in files("parse") {
        for (name, text) in cases(name, &path) {
            let ptxas = ptxas.clone();
            trials.push(Trial::test(name, move || parse_text(&text, ptxas.as_deref())));
        }
    }
    for (name, path) in files("verify") {
        trials.push(Trial::test(name, move || verify_file(&path)));
    }
    for (name, path) in files("emit") {
        trials.push(Trial::test(name, move || emit_file(&path)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}
