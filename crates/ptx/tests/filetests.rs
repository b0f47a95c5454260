//! Text tests, one folder per purpose, see `flashcore_filetest` (add `-- parse/mma` to run some).
//!
//! - `filetests/parse/*.ptx` is parsed. A comment `// error: TEXT` on a line expects a parse error on this
//!   line whose message contains TEXT. A file without such a comment must parse and verify, survive a round
//!   trip through the printer, and be accepted by ptxas, both as written and as printed.
//! - `filetests/verify/*.ptx` is parsed and verified. Each `// error: RULE: TEXT` expects a violation on its
//!   line, each `//! error: RULE: TEXT` one outside instructions. Any other violation fails the test.
//! - `filetests/emit/*.ptx` is parsed and printed. The text must equal the `.out` file of the same name.

mod ptxas;

use std::path::PathBuf;
use std::sync::LazyLock;

use filetest::{Case, expected_errors, golden};
use flashcore_ptx::{Module, Violation, parse};

static PTXAS: LazyLock<Option<PathBuf>> = LazyLock::new(ptxas::find);

fn parse_case(case: &Case) -> Result<(), String> {
    match (expected_errors(&case.text).as_slice(), parse(&case.text)) {
        ([], Ok(module)) => accepted(&case.text, &module),
        ([], Err(error)) => Err(error.to_string()),
        ([error, ..], Ok(_)) => Err(format!("the text was parsed; expected {error:?}")),
        ([error, ..], Err(found)) => {
            if error.fits(found.line, &found.message) {
                return Ok(());
            }
            Err(format!("expected {error:?}, found {found}"))
        }
    }
}

fn accepted(text: &str, module: &Module) -> Result<(), String> {
    module.check().map_err(|violations| violations.to_string())?;
    let printed = module.to_string();
    let again = parse(&printed).map_err(|e| format!("printed text: {e}"))?;
    if again != *module {
        return Err(format!("the printed text reads back as another module:\n{printed}"));
    }
    if again.to_string() != printed {
        return Err("printing is not stable".into());
    }
    if let Some(ptxas) = &*PTXAS {
        for text in [text, &printed] {
            ptxas::assemble(ptxas, text, module.target)?;
        }
    }
    Ok(())
}

fn verify_case(case: &Case) -> Result<(), String> {
    let mut wanted = expected_errors(&case.text);
    let module = parse(&case.text).map_err(|e| e.to_string())?;
    let found: Vec<Violation> = module.check().map_or_else(|violations| violations.0, |()| Vec::new());
    for violation in found {
        let message = format!("{}: {}", violation.rule.name(), violation.message);
        match wanted.iter().position(|w| w.fits(violation.line, &message)) {
            Some(i) => drop(wanted.swap_remove(i)),
            None => return Err(format!("not expected: {violation}")),
        }
    }
    if wanted.is_empty() { Ok(()) } else { Err(format!("expected, but not found: {wanted:?}")) }
}

fn emit_case(case: &Case) -> Result<(), String> {
    let printed = parse(&case.text).map_err(|e| e.to_string())?.to_string();
    golden(&case.path.with_extension("out"), &printed)
}

fn main() {
    filetest::main(&[("parse", parse_case), ("verify", verify_case), ("emit", emit_case)]);
}
