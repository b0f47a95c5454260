//! Text tests of the parser, the verifier and the printer, in `filetests/{parse,verify,emit}`.
//!
//! A file is a preamble, then cases, each after a line `//# name`; the preamble stands before each case, and a brace
//! that it leaves open is closed behind it. A case that has no expectation must pass.
//! - `parse`: `// error: text` stands on the line where parsing stops, with a part of the message.
//! - `verify`: `// error[rule]: text` stands on each line that the verifier refuses, `//! error[rule]: text` anywhere for
//!   errors outside instructions. `//! minimum: 7.8` is the lowest version. What passes is also given to ptxas.
//! - `emit`: after a line `//=` stands the printed module. `FLASHCORE_BLESS=1` writes it anew.

mod ptxas;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flashcore_ptx::{Module, Statement, parse};
use libtest_mimic::{Arguments, Failed, Trial};

/// One module to test.
struct Case {
    name: String,
    text: String,
}

fn files(purpose: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests").join(purpose);
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the filetests stand in the repository")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "ptx"))
        .collect();
    files.sort();
    files
}

/// The cases of a file.
fn cases(path: &Path) -> Vec<Case> {
    let file = std::fs::read_to_string(path).expect("a listed file can be read");
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut parts = file.split("//# ");
    let preamble = parts.next().unwrap_or_default();
    let open = preamble.matches('{').count() > preamble.matches('}').count();
    let case = |part: &str| {
        let (name, body) = part.split_once('\n').unwrap_or((part, ""));
        let close = if open { "}\n" } else { "" };
        Case { name: format!("{stem}/{}", name.trim()), text: format!("{preamble}{body}{close}") }
    };
    parts.map(case).collect()
}

/// `(line, rule, text)` of each `// error…` comment; line 0 for `//! error…`.
fn expectations(text: &str) -> Vec<(u32, String, String)> {
    let mut found = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        for (mark, number) in [("// error", number), ("//! error", 0)] {
            let Some((_, rest)) = line.split_once(mark) else { continue };
            let Some((rule, message)) = rest.split_once(": ") else { continue };
            found.push((number, rule.trim_matches(['[', ']']).to_owned(), message.trim().to_owned()));
        }
    }
    found
}

fn round_trip(text: &str) -> Result<Module, Failed> {
    let module = parse(text)?;
    let printed = module.to_string();
    let again = parse(&printed).map_err(|e| format!("{printed}\n{e}"))?;
    if again != module {
        return Err(format!("reads back as another module:\n{printed}").into());
    }
    Ok(module)
}

fn check_parse(case: &Case) -> Result<(), Failed> {
    let expected = expectations(&case.text);
    let Some((line, _, message)) = expected.first() else { return round_trip(&case.text).map(|_| ()) };
    let error = match parse(&case.text) {
        Ok(_) => return Err(format!("parsed, but should fail with: {message}").into()),
        Err(error) => error,
    };
    if error.line != *line || !error.message.contains(message.as_str()) {
        return Err(format!("expected line {line}: {message}\nfound {error}").into());
    }
    Ok(())
}

fn check_verify(case: &Case, ptxas: Option<&Path>) -> Result<(), Failed> {
    let module = round_trip(&case.text)?;
    let minimum = case.text.lines().find_map(|line| line.split_once("//! minimum: "));
    if let Some((_, minimum)) = minimum
        && module.minimum_version().to_string() != minimum.trim()
    {
        return Err(format!("minimum is {}, expected {minimum}", module.minimum_version()).into());
    }
    let expected = expectations(&case.text);
    let errors = match module.verify() {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0,
    };
    for (line, rule, message) in &expected {
        let fits = errors
            .iter()
            .any(|e| e.line == *line && e.rule.name() == rule && e.message.contains(message.as_str()));
        if !fits {
            let found: Vec<String> = errors.iter().map(|e| e.to_string()).collect();
            return Err(
                format!("expected line {line} [{rule}]: {message}\nfound:\n{}", found.join("\n")).into()
            );
        }
    }
    if let Some(error) = errors.iter().find(|e| !expected.iter().any(|(line, ..)| *line == e.line)) {
        return Err(format!("not expected: {error}").into());
    }
    match ptxas {
        Some(ptxas) if expected.is_empty() => Ok(ptxas::assemble(ptxas, &module)?),
        _ => Ok(()),
    }
}

fn check_emit(path: &Path) -> Result<(), Failed> {
    let file = std::fs::read_to_string(path)?;
    let (input, golden) = file.split_once("//=\n").unwrap_or((&file, ""));
    let printed = round_trip(input)?.to_string();
    if printed == golden {
        return Ok(());
    }
    if std::env::var_os("FLASHCORE_BLESS").is_some() {
        return Ok(std::fs::write(path, format!("{input}//=\n{printed}"))?);
    }
    Err(format!("expected:\n{golden}\nprinted:\n{printed}").into())
}

/// Names of instructions of which at least one form must stand in `filetests/verify`.
const FAMILIES: &str = "abs neg not cnot popc clz brev bfind rcp sqrt rsqrt sin cos lg2 ex2 tanh add sub mul mul24 div \
    rem min max and or xor shl shr copysign fma mad mad24 sad addc subc madc setp set selp slct testp lop3 shf bfe bfi \
    prmt bmsk szext fns dp4a dp2a mov cvt cvta isspacep mapa getctarank ld ldu st atom red prefetch prefetchu discard \
    createpolicy cp ldmatrix stmatrix movmatrix mma shfl vote match redux activemask elect bar barrier membar fence \
    mbarrier bra brx call ret exit trap brkpt nanosleep pmevent setmaxnreg griddepcontrol";

fn check_families(modules: &[Case]) -> Result<(), Failed> {
    let mut seen = std::collections::HashSet::new();
    for module in modules.iter().filter_map(|case| parse(&case.text).ok()) {
        for statement in module.functions().filter_map(|f| f.body.as_ref()).flat_map(|b| &b.statements) {
            if let Statement::Inst(inst) = statement {
                seen.insert(inst.op.to_string().split('.').next().unwrap_or_default().to_owned());
            }
        }
    }
    let missing: Vec<&str> = FAMILIES.split_whitespace().filter(|name| !seen.contains(*name)).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("no case holds {}", missing.join(", ")).into()) }
}

fn main() {
    let arguments = Arguments::from_args();
    let ptxas = ptxas::find().map(Arc::new);
    let mut trials = Vec::new();
    for case in files("parse").iter().flat_map(|path| cases(path)) {
        trials.push(Trial::test(format!("parse/{}", case.name), move || check_parse(&case)));
    }
    for case in files("verify").iter().flat_map(|path| cases(path)) {
        let ptxas = ptxas.clone();
        let name = format!("verify/{}", case.name);
        trials.push(Trial::test(name, move || check_verify(&case, ptxas.as_deref().map(PathBuf::as_path))));
    }
    for path in files("emit") {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        trials.push(Trial::test(format!("emit/{name}"), move || check_emit(&path)));
    }
    let all: Vec<Case> = files("verify").iter().flat_map(|path| cases(path)).collect();
    trials.push(Trial::test("verify/every family appears", move || check_families(&all)));
    libtest_mimic::run(&arguments, trials).exit();
}
