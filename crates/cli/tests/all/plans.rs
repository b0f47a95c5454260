//! Tests of `flashcore plans`, and of the plans that calls use.

use judge::values::Values;
use std::collections::BTreeMap;

use crate::folder::{Folder, text};
use check::files::{Tensor, save};
use problem::DType;
use serde_json::{Value, json};

/// A problem of two heads, 32 rows and 16 dimensions, as text and as a file `in.safetensors`.
const PROBLEM: &str = "1,2,32,16,f32";

fn input(folder: &Folder) {
    let tensor = || Tensor { values: Values::zeros(DType::F32, 2 * 32 * 16), shape: vec![1, 2, 32, 16] };
    let tensors = BTreeMap::from(["q", "k", "v"].map(|name| (name.to_owned(), tensor())));
    save(&folder.0.join("in.safetensors"), &tensors).unwrap();
}

/// The plan that `run` used, the source of the plan, and the messages on standard error.
fn run(folder: &Folder, extra: &[&str]) -> (Value, String, String) {
    let args = [&["run", "--q", "in.safetensors", "--out", "out.safetensors", "--json"], extra].concat();
    let output = folder.run(&args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    (told["plan"].clone(), told["plan_source"].as_str().unwrap().to_owned(), text(&output.stderr))
}

fn plan(block_q: usize) -> Value {
    json!({
        "isa": "portable", "threads": 1, "block_q": block_q, "block_kv": 8, "lanes": "queries", "vectors": 1,
        "tile_rows": 2, "rows": "head", "order": "longest", "splits": 1,
    })
}

#[test]
fn a_kept_plan_is_used_until_it_is_cleared() {
    let folder = Folder::new("kept");
    input(&folder);
    let (default, source, _) = run(&folder, &[]);
    assert_eq!(source, "default");
    folder.write("four.json", &plan(4).to_string());
    folder.write("six.json", &json!({ "cpu": plan(6) }).to_string());
    let add = |file: &str| {
        let output = folder.run(&["plans", "add", "--problem", PROBLEM, "--plan", file]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    };
    add("four.json");
    assert_eq!(run(&folder, &[]), (plan(4), "kept".to_owned(), String::new()));
    // The later plan of a problem takes the place of the earlier one.
    add("six.json");
    assert_eq!(run(&folder, &[]).0, plan(6));
    let again = folder.run(&["plans", "add", "--problem", PROBLEM, "--plan", "six.json"]);
    assert!(text(&again.stderr).contains("1 replaced; "), "{}", text(&again.stderr));
    let list = text(&folder.run(&["plans", "list"]).stdout);
    assert!(list.contains(PROBLEM) && list.contains("yes") && list.lines().count() == 2, "{list}");
    // A plan on the command line comes first, and other problems keep the default.
    assert_eq!(run(&folder, &["--plan", "four.json"]).1, "given");
    assert_eq!(run(&folder, &["--softcap", "20"]).1, "default");
    let cleared = folder.run(&["plans", "clear", "--problem", PROBLEM, "--json"]);
    assert_eq!(serde_json::from_slice::<Value>(&cleared.stdout).unwrap()["removed"], 1);
    assert_eq!(run(&folder, &[]), (default, "default".to_owned(), String::new()));
}

#[test]
fn a_damaged_file_costs_a_warning_and_no_result() {
    let folder = Folder::new("damaged-plans");
    input(&folder);
    folder.write("four.json", &plan(4).to_string());
    folder.run(&["plans", "add", "--problem", PROBLEM, "--plan", "four.json"]);
    let file = folder.0.join("config/plans.jsonl");
    let good = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("no plan\n{good}")).unwrap();
    let (used, _, warning) = run(&folder, &[]);
    assert_eq!(used, plan(4));
    assert!(warning.contains("line 1 of ") && warning.contains("plans.jsonl is ignored"), "{warning}");
    std::fs::write(&file, format!("\n{good}\nno plan\n")).unwrap();
    let list = text(&folder.run(&["plans", "list"]).stdout);
    assert!(list.contains("no: line 4 of the file: expected"), "{list}");
    std::fs::write(&file, good.replace("\"block_q\":4", "\"block_q\":0")).unwrap();
    let (_, source, warning) = run(&folder, &[]);
    assert!(source == "default" && warning.contains("invalid value '0' for plan.block_q"), "{warning}");
    // A folder in place of the file.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let (_, source, warning) = run(&folder, &[]);
    assert!(source == "default" && warning.contains("not a regular file"), "{warning}");
    let output = folder.run(&["plans", "list"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("not a regular file"), "{}", text(&output.stderr));
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let folder = Folder::new("refused-plans");
    folder.write("bad.json", &plan(0).to_string());
    folder.write("gpu.json", "{\"gpu\": {}}");
    folder.write("good.json", &plan(4).to_string());
    for (args, why) in [
        (&["--problem", PROBLEM, "--plan", "bad.json"][..], "invalid value '0' for plan.block_q"),
        (&["--problem", PROBLEM, "--plan", "gpu.json"], "this is a gpu plan; expected a cpu plan"),
        (&["--problem", "1,2", "--plan", "good.json"], "for --problem"),
        (
            &["--problem", "1,1,16,16,f32,backward", "--plan", "good.json"],
            "expected a forward pass on the CPU",
        ),
        (
            &["--problem", PROBLEM, "--plan", "good.json", "--threads", "0"],
            "invalid value '0' for --threads: expected a whole number from 1",
        ),
        (&["--problem", PROBLEM, "--plan", "none.json"], "cannot read none.json"),
    ] {
        let output = folder.run(&[&["plans", "add"], args].concat());
        let message = text(&output.stderr);
        assert!(output.status.code() == Some(3) && message.contains(why), "{args:?}: {message}");
    }
    assert!(!folder.0.join("config").exists());
}

#[test]
fn a_search_keeps_what_it_promotes() {
    let folder = Folder::new("promoted-plans");
    // A baseline that is several times slower than the default plan.
    let slow = json!({ "isa": "portable", "threads": 1, "block_q": 1, "block_kv": 16 });
    folder.write("slow.json", &slow.to_string());
    let search = |extra: &[&str]| {
        let output = folder.run(&[&["evolve", "--json"], extra].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (report, text(&output.stderr))
    };
    let begin = ["--problem", "1,2,128,32,f32", "--seed-plan", "slow.json", "--candidates"];
    search(&[&begin[..], &["12", "--no-keep"]].concat());
    assert!(!folder.0.join("config").exists());
    let (report, told) = search(&[&begin[..], &["12"]].concat());
    let list =
        || -> Value { serde_json::from_slice(&folder.run(&["plans", "list", "--json"]).stdout).unwrap() };
    // A busy machine may leave every race undecided: then nothing is promoted, and nothing is kept.
    let is_promoted = report["promoted"].is_object();
    let kept = list();
    let rows = kept["rows"].as_array().unwrap();
    assert_eq!(
        (rows.len(), told.contains("is kept in")),
        (usize::from(is_promoted), is_promoted),
        "{report}{told}"
    );
    for row in rows {
        // The plan that calls used before is the shipped one, not the slow one.
        let shipped = report["promoted"]["shipped"]["ratio"].as_f64().unwrap();
        assert!(row["used"] == "yes", "{row}");
        assert!((row["speedup"].as_f64().unwrap() * shipped - 1.0).abs() < 1e-9, "{row}: {report}");
    }
    // To report a complete run changes no plan, whether the run was begun to keep one or not.
    for run in ["1", "2"] {
        let (_, told) = search(&["--resume", run]);
        assert!(!told.contains("is kept in"), "{told}");
    }
    assert_eq!(list(), kept);
}
