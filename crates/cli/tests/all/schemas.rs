//! Checks the JSON outputs of the built command against their schemas in the book.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::folder::{Folder, text};
use serde_json::{Value, json};

const SMALL: &str = "1,1,64,16,f16";

fn schemas() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/reference/schemas")
}

fn schema(name: &str) -> Value {
    let path = schemas().join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The places where `value` violates `schema`. The schema is a JSON Schema of the keywords that the book's
/// schemas use. A key that `properties` does not describe is a violation too, unless the object has
/// `additionalProperties`.
fn faults(schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (keyword, wanted) in schema.as_object().expect("a schema is an object") {
        match keyword.as_str() {
            "$schema" | "title" | "description" | "additionalProperties" => {}
            "type" => {
                let kinds = wanted.as_array().cloned().unwrap_or_else(|| vec![wanted.clone()]);
                if !kinds.iter().any(|kind| is_a(kind.as_str().unwrap(), value)) {
                    found.push(format!("{at}: {value} is not of type {wanted}"));
                }
            }
            "const" if wanted != value => found.push(format!("{at}: {value} is not {wanted}")),
            "const" => {}
            "enum" if !wanted.as_array().unwrap().contains(value) => {
                found.push(format!("{at}: {value} is none of {wanted}"));
            }
            "enum" => {}
            "required" => {
                let Some(object) = value.as_object() else { continue };
                let keys = wanted.as_array().unwrap().iter().map(|key| key.as_str().unwrap());
                let missing = keys.filter(|key| !object.contains_key(*key));
                found.extend(missing.map(|key| format!("{at}: the key {key} is missing")));
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    found.extend(faults(wanted, item, &format!("{at}[{index}]")));
                }
            }
            "properties" => {
                for (key, inner) in value.as_object().into_iter().flatten() {
                    match wanted.get(key) {
                        Some(described) => found.extend(faults(described, inner, &format!("{at}.{key}"))),
                        None if schema.get("additionalProperties").is_some() => {}
                        None => found.push(format!("{at}: the key {key} is not described")),
                    }
                }
            }
            other => panic!("{at}: the keyword {other} is not known to this test"),
        }
    }
    found
}

fn is_a(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{other} is no type of JSON"),
    }
}

/// The names of the outputs that were checked against their schemas.
#[derive(Default)]
struct Held(BTreeSet<String>);

impl Held {
    /// Checks each line of an output against the schema that the line names.
    fn lines(&mut self, name: &str, output: &str) {
        assert!(!output.trim().is_empty(), "{name} printed nothing");
        for line in output.lines() {
            let value: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{name}: {e}: {line}"));
            assert_eq!(value["schema"], format!("flashcore.{name}/1"), "{line}");
            // `FLASHCORE_OUTPUTS` names a folder for the outputs, from which a new schema can be drafted.
            if let Some(folder) = std::env::var_os("FLASHCORE_OUTPUTS") {
                let file = Path::new(&folder).join(format!("{name}.json"));
                let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
                writeln!(file, "{line}").unwrap();
                continue;
            }
            assert_eq!(faults(&schema(name), &value, name), Vec::<String>::new());
        }
        self.0.insert(name.to_owned());
    }

    fn run(&mut self, folder: &Folder, name: &str, args: &[&str]) {
        let output = folder.run(&[args, &["--json"]].concat());
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 1)), "{args:?}: {code:?} {}", text(&output.stderr));
        self.lines(name, &text(&output.stdout));
    }
}

#[test]
fn every_output_fits_its_schema() {
    let folder = Folder::new("schemas");
    let mut held = Held::default();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/corpus");
    let corpus = |name: &str| corpus.join(name).display().to_string();
    let (ptx, launch) = (corpus("triton_flash_sm80.ptx"), corpus("triton_flash.toml"));
    let racy = std::fs::read_to_string(&ptx).unwrap().replace("bar.sync \t0;", "");
    assert!(racy.len() < std::fs::read_to_string(&ptx).unwrap().len(), "the corpus has barriers to drop");
    let racy = folder.write("racy.ptx", &racy);
    held.run(&folder, "check", &["check", &ptx, "--launch", &launch, "--quick"]);
    held.run(&folder, "check", &["check", &ptx, "--launch", &launch, "--budget", "1"]);
    held.run(&folder, "check", &["check", &racy, "--launch", &launch, "--quick"]);
    // A kernel with line information.
    if let Some(lined) = filetest::cuda::ptx("warp_specialised") {
        let cuda = filetest::cuda::folder().join("warp_specialised.cu");
        let source = std::fs::read_to_string(cuda).unwrap();
        let spec: Vec<&str> = source.lines().filter_map(|line| line.strip_prefix("//! ")).collect();
        let spec = spec.join("\n").replacen("[launch]", "[launch]\nentry = \"wrong\"", 1);
        let (lined, spec) = (folder.write("lined.ptx", &lined), folder.write("lined.toml", &spec));
        folder.write("warp_specialised.cu", &source);
        held.run(&folder, "check", &["check", &lined, "--launch", &spec]);
        held.run(&folder, "check", &["check", &lined, "--launch", &spec, "--lines"]);
        held.run(&folder, "explain", &["explain", &lined, "--launch", &spec]);
    }
    held.run(&folder, "explain", &["explain", &ptx, "--launch", &launch]);
    held.run(&folder, "explain", &["explain", &ptx, "--launch", &launch, "--against", &racy]);
    held.run(&folder, "explain-problem", &["explain", "--problem", "1,8,512,64,f16", "--device", "h200"]);
    held.run(&folder, "version", &["version"]);
    held.run(&folder, "doctor", &["doctor"]);
    held.run(&folder, "accuracy", &["accuracy", "--keys", "512"]);
    held.run(&folder, "bench", &["bench", "--problem", SMALL, "--seconds", "0.05"]);
    held.run(&folder, "microbench", &["lab", "microbench", "--emulator", "--only", "fma chain"]);
    held.run(&folder, "evolve", &["evolve", "--device", "h200", "--problem", SMALL, "--candidates", "8"]);
    let several = ["evolve", "--device", "h200", "--problem", SMALL, "--problem", "1,1,32,16,f16"];
    let several = [&several[..], &["--candidates", "4", "--ledger", "several.ledger"]].concat();
    held.run(&folder, "evolve-several", &several);
    held.run(&folder, "report", &["report"]);
    held.run(&folder, "topk", &["topk", "--problem", SMALL, "--device", "h200"]);
    held.run(&folder, "ledger-runs", &["ledger", "runs"]);
    held.run(&folder, "ledger-check", &["ledger", "check"]);
    held.run(&folder, "ledger-export", &["ledger", "export", "facts.jsonl"]);
    // This command uses a separate ledger, where the first forecast has the number 1.
    let ledger = ["--ledger", "ideas.ledger"];
    let add = ["forecast", "add", "an idea", "--author", "Ada", "--device", "h200", "--problem", SMALL];
    let mut ideas = |name: &str, args: &[&str]| held.run(&folder, name, &[args, &ledger].concat());
    ideas("forecast", &[&add[..], &["--us", "3"]].concat());
    ideas("forecast", &["forecast", "outcome", "1", "--us", "3.1"]);
    ideas("forecast-list", &["forecast", "list"]);
    ideas("forecast-score", &["forecast", "score"]);
    ideas("forecast-recalibrate", &["forecast", "recalibrate", "--device", "h200"]);
    folder.write("README.md", "no tables\n");
    held.run(&folder, "tables", &["lab", "tables", "README.md", "--check"]);
    npy(&folder);
    let run = ["run", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "--out", "out.npy"];
    held.run(&folder, "run", &run);
    let tiny = "1,1,4,8,f32";
    folder.write("plan.json", "{\"isa\": \"portable\", \"threads\": 1, \"block_q\": 2, \"block_kv\": 4}");
    held.run(&folder, "plans-change", &["plans", "add", "--problem", tiny, "--plan", "plan.json"]);
    held.run(&folder, "run", &run);
    held.run(&folder, "plans", &["plans", "list"]);
    held.run(&folder, "plans-check", &["plans", "check", "--seconds", "0.01"]);
    held.run(&folder, "plans-change", &["plans", "clear"]);
    serve(&folder, &mut held);
    held.lines("emulate", &crate::emulate::answers());
    crate::capture::objects().iter().for_each(|object| held.lines("capture", object));
    let listed = std::fs::read_dir(schemas()).unwrap().flatten().map(|entry| entry.path());
    let listed: BTreeSet<String> =
        listed.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    assert_eq!(held.0, listed, "outputs that were held against their schemas, and the schemas");
}

/// Writes x.npy: a tensor of zeros of shape (1, 1, 4, 8).
fn npy(folder: &Folder) {
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 4, 8), }";
    let header = format!("{header:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend([0; 4 * 32]);
    std::fs::write(folder.0.join("x.npy"), bytes).unwrap();
}

/// Starts the server, reads the line with its address and ends it.
fn serve(folder: &Folder, held: &mut Held) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.args(["--json", "serve", "--port", "0"]).current_dir(&folder.0);
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    held.lines("serve", &line);
}

#[test]
fn a_faulty_output_does_not_fit() {
    let folder = Folder::new("faulty");
    let output = folder.run(&["version", "--json"]);
    let right: Value = serde_json::from_slice(&output.stdout).unwrap();
    let schema = schema("version");
    assert_eq!(faults(&schema, &right, "version"), Vec::<String>::new());
    let mut changed = [right.clone(), right.clone(), right.clone()];
    changed[0].as_object_mut().unwrap().remove("version");
    changed[1]["more"] = json!(1);
    changed[2]["schema"] = json!("flashcore.version/2");
    for wrong in changed {
        assert_eq!(faults(&schema, &wrong, "version").len(), 1, "{wrong}");
    }
}

/// A tensor and a page are sent through pipes. Nothing else is printed on standard output.
#[test]
fn standard_input_and_output_take_the_place_of_files() {
    let folder = Folder::new("pipes");
    npy(&folder);
    let pipe = |args: &[&str], input: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        let input = std::fs::File::open(folder.0.join(input)).unwrap();
        command.args(args).current_dir(&folder.0).stdin(input).output().unwrap()
    };
    let file = folder.run(&["run", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "--out", "out.npy"]);
    assert!(file.status.success() && file.stdout.is_empty(), "{}", text(&file.stderr));
    let output = pipe(&["run", "--q", "-", "--k", "-", "--v", "-", "--out", "-"], "x.npy");
    assert_eq!(output.stdout, std::fs::read(folder.0.join("out.npy")).unwrap(), "{}", text(&output.stderr));
    let ptx = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n    ret;\n}\n";
    folder.write("kernel.ptx", ptx);
    let launch = folder.write("launch.toml", "[launch]\ngrid = [1]\nblock = [1]\n");
    let output = pipe(&["check", "-", "--launch", &launch], "kernel.ptx");
    assert!(text(&output.stdout).starts_with("passed"), "{}", text(&output.stderr));
    let output = pipe(&["check", "kernel.ptx", "--launch", "-", "--quiet"], "launch.toml");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    for (args, words) in [
        (&["check", "-", "--launch", "-"][..], "invalid value '-' for --launch: expected a file"),
        (&["run", "--q", "x.npy", "--out", "-", "--json"], "invalid value '-' for --out: expected a file"),
        (&["man", "--json"], "invalid value '--json' for man"),
    ] {
        let output = folder.run(args);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(3) && said.contains(words), "{args:?}: {said}");
    }
}

#[test]
fn colour_completions_and_manual_pages() {
    let folder = Folder::new("help");
    let ptx = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n    ret;\n}\n";
    let ptx = folder.write("kernel.ptx", ptx);
    let launch = folder.write("launch.toml", "[launch]\ngrid = [1]\nblock = [1]\n");
    let check = |colour: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.env("NO_COLOR", "1").args(["check", &ptx, "--launch", &launch, "--color", colour]);
        text(&command.output().unwrap().stdout)
    };
    assert!(check("always").starts_with("\x1b[1m\x1b[32mpassed\x1b[0m"), "{:?}", check("always"));
    assert!(!check("auto").contains('\x1b') && !check("never").contains('\x1b'));
    for (shell, part) in [("bash", "_flashcore()"), ("zsh", "#compdef flashcore"), ("fish", "complete -c")] {
        let script = text(&folder.run(&["completions", shell]).stdout);
        assert!(script.contains(part) && script.contains("require-coverage"), "{shell}: {script}");
    }
    assert!(folder.run(&["man", "--out", "pages"]).status.success());
    let page = std::fs::read_to_string(folder.0.join("pages/flashcore-check.1")).unwrap();
    assert!(page.contains(".SH EXAMPLES") && page.contains("require\\-coverage"), "{page}");
    assert!(
        folder.0.join("pages/flashcore.1").exists() && !folder.0.join("pages/flashcore-worker.1").exists()
    );
    let said = text(&folder.run(&["evolv"]).stderr);
    assert!(said.contains("unknown command 'evolv'; did you mean 'evolve'?"), "{said}");
    let said = text(&folder.run(&["bench", "--device", "cdua"]).stderr);
    assert!(said.ends_with("expected cpu, cuda, cuda:N, auto; did you mean 'cuda'?\n"), "{said}");
}
