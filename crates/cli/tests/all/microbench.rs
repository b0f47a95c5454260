//! `flashcore lab microbench` without a GPU.

use std::process::{Command, Output};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashcore")).args(args).output().unwrap()
}

/// The path of a file for one test.
fn file(name: &str) -> String {
    std::env::temp_dir().join(format!("flashcore-{}-{name}", std::process::id())).display().to_string()
}

#[test]
fn the_description_is_read_by_explain() {
    let file = file("machine.json");
    let found = run(&["lab", "microbench", "--emulator", "--only", "chain", "--out", &file]);
    let text = String::from_utf8(found.stdout).unwrap();
    assert_eq!(found.status.code(), Some(0), "{}", String::from_utf8_lossy(&found.stderr));
    assert!(text.contains("latency.shuffle") && text.contains("cp.async chain in L2"), "{text}");
    let description: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(description["base"], "H200");
    // The emulator's clock counts instructions: one for each link of the dependence chain.
    let constants = description["constants"].as_array().unwrap();
    let alu = constants.iter().find(|constant| constant["name"] == "latency.alu").unwrap();
    assert_eq!((&alu["measured"], &alu["table"]), (&1.0.into(), &4.0.into()));
    assert_eq!(description["machine"]["latency"]["alu"], 1);
    // Constants that were not measured come from the table.
    assert_eq!(description["machine"]["rates"]["fma"], 128);
    let explained = run(&["explain", "--machine", &file, "--json"]);
    assert_eq!(explained.status.code(), Some(0), "{}", String::from_utf8_lossy(&explained.stderr));
    let explained: Value = serde_json::from_slice(&explained.stdout).unwrap();
    assert_eq!(explained["prediction"]["machine"], "emulator, sm_90");
    std::fs::remove_file(file).unwrap();
}

#[test]
fn bad_usage_is_told() {
    let file = file("none.json");
    for (args, said) in [
        (vec!["--emulator", "--only", "nothing of the kind"], "expected a word in the name of a probe"),
        (vec!["--device", "cpu"], "expected cuda, cuda:N"),
        (vec!["--device", "tpu"], "expected cpu, cuda"),
        (vec!["--emulator", "--out", "/nonexistent/x.json"], "/nonexistent/x.json"),
    ] {
        let mut all = vec!["lab", "microbench"];
        if !args.contains(&"--out") {
            all.extend(["--out", &file]);
        }
        all.extend(args);
        let found = run(&all);
        let text = String::from_utf8_lossy(&found.stderr).into_owned();
        assert!(found.status.code() == Some(3) && text.contains(said), "{all:?}: {text}");
    }
    let has_gpu = driver::devices().is_ok_and(|devices| !devices.is_empty());
    let found = run(&["lab", "microbench", "--out", &file, "--only", "fma chain"]);
    assert_eq!(found.status.code(), Some(if has_gpu { 0 } else { 3 }));
    let text = String::from_utf8_lossy(&found.stderr).into_owned();
    assert!(has_gpu || text.contains("CUDA driver"), "{text}");
    assert!(has_gpu || !std::path::Path::new(&file).exists());
    let found = run(&["explain", "--machine", "/nonexistent/machine.json"]);
    assert_eq!(found.status.code(), Some(3));
}
