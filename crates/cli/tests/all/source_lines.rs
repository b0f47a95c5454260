//! `check` on PTX with line information: the findings in source lines, as text, JSON, SARIF and JUnit XML.

use std::collections::BTreeSet;
use std::path::Path;

use crate::folder::{Folder, text};
use serde_json::Value;

/// A folder with the source, the PTX and the launch file of an entry of a kernel of `filetests/cuda`; `None`
/// without NVRTC.
fn kernel(name: &str, entry: &str) -> Option<Folder> {
    let ptx = filetest::cuda::ptx(name)?;
    let folder = Folder::new(&format!("lines-{name}-{entry}"));
    let source = std::fs::read_to_string(filetest::cuda::folder().join(name).with_extension("cu")).unwrap();
    let launch: Vec<&str> = source.lines().filter_map(|line| line.strip_prefix("//! ")).collect();
    let launch = launch.join("\n").replacen("[launch]", &format!("[launch]\nentry = \"{entry}\""), 1);
    folder.write(&format!("{name}.cu"), &source);
    folder.write(&format!("{name}.ptx"), &ptx);
    folder.write("launch.toml", &launch);
    Some(folder)
}

/// Runs `check` on the PTX in the folder. Returns the exit code and both outputs.
fn check(folder: &Folder, name: &str, more: &[&str]) -> (Option<i32>, String, String) {
    let file = format!("{name}.ptx");
    let output = folder.run(&[&["check", &file, "--launch", "launch.toml"], more].concat());
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn findings_name_source_lines_calls_and_cures() {
    let Some(folder) = kernel("template_helper", "wrong") else { return };
    let (code, said, error) = check(&folder, "template_helper", &[]);
    assert_eq!(code, Some(1), "{error}");
    for part in [
        "1. race at template_helper.cu:10 (and template_helper.cu:11): ",
        "template_helper.cu:10 | words[threadIdx.x] = mine;",
        "template_helper.cu:11 | return words[(threadIdx.x + by) % N];  // hazard:",
        "tile::rotated<float, 64>, inlined at template_helper.cu:17 in wrong",
        "wrong::words[0x80]",
        "PTX 40 | st.shared.f32",
        "cure: put __syncthreads() between the two accesses",
        "2. uninitialised_read at template_helper.cu:11: ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("3. "), "each cause once: {said}");
    // The message names a source even if it cannot be read.
    std::fs::remove_file(folder.0.join("template_helper.cu")).unwrap();
    let (_, said, _) = check(&folder, "template_helper", &[]);
    assert!(
        said.contains("race at filetests/cuda/template_helper.cu:10") && said.contains("cannot be read"),
        "{said}"
    );
}

/// A kernel whose loop is unrolled has one cause for all copies of a line.
#[test]
fn json_has_each_cause_once_and_lines_when_asked() {
    let Some(folder) = kernel("warp_specialised", "wrong") else { return };
    let json = |folder: &Folder, more: &[&str]| -> Value {
        let (_, said, error) = check(folder, "warp_specialised", &[&["--json"], more].concat());
        serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{error}"))
    };
    let (short, long) = (json(&folder, &[]), json(&folder, &["--lines"]));
    assert_eq!(short["verdict"], "failed");
    let causes = short["hazards"].as_array().unwrap();
    let pairs: BTreeSet<String> = causes
        .iter()
        .map(|c| format!("{} {} {}", c["kind"], c["source"]["line"], c["other_source"]["line"]))
        .collect();
    assert_eq!(pairs.len(), causes.len(), "{pairs:?}");
    assert_eq!(causes.len(), short["reasons"].as_array().unwrap().len());
    assert!(long["hazard_lines"].as_array().unwrap().len() > causes.len());
    assert!(short.get("hazard_lines").is_none() && short["counters"].get("instructions").is_none());
    assert!(long["counters"]["instructions"].as_array().unwrap().len() > 100);
    assert!(long["hazards"][0]["ptx_lines"].is_array() && short["hazards"][0].get("ptx_lines").is_none());
    let Some(right) = kernel("warp_specialised", "right") else { return };
    let right = json(&right, &[]);
    let lines = right["counters"]["source_lines"].as_array().unwrap();
    let sum = lines.iter().find(|line| line["text"].as_str().unwrap().starts_with("acc += stage")).unwrap();
    assert_eq!(sum["flop"], 8 * 128, "{sum}");
    assert_eq!(short["kernel"]["entry"], "wrong");
    let refused = check(&folder, "warp_specialised", &["--lines"]);
    assert!(refused.0 == Some(3) && refused.2.contains("--json"), "{}", refused.2);
}

#[test]
fn uncovered_lines_are_listed() {
    let Some(folder) = kernel("trap", "right") else { return };
    let (code, said, _) = check(&folder, "trap", &["--coverage"]);
    assert_eq!(code, Some(0), "{said}");
    let listed = said.lines().find(|line| line.contains("trap.cu:13 | ")).unwrap_or_else(|| panic!("{said}"));
    assert!(
        listed.contains("if (x[threadIdx.x] == 32) __trap();") && listed.ends_with(" instructions)"),
        "{said}"
    );
    assert!(
        said.contains("instructions executed") && said.contains("not fully executed: trap.cu:13"),
        "{said}"
    );
    let (_, said, _) = check(&folder, "trap", &["--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    let lines = said["coverage"]["source_lines"].as_array().unwrap();
    assert_eq!((lines.len(), &lines[0]["line"]), (1, &13.into()), "{lines:?}");
    // Without line information the lines of the PTX are listed.
    let plain = std::fs::read_to_string(folder.0.join("trap.ptx")).unwrap().replace(".loc", "// loc");
    folder.write("trap.ptx", &plain);
    let (_, said, _) = check(&folder, "trap", &["--coverage"]);
    assert!(said.lines().any(|line| line.contains("PTX ") && line.ends_with("| trap;")), "{said}");
}

/// The violations of SARIF 2.1.0 (sections 3.13 to 3.52) or of the code hosts' rules in a log.
fn faults(log: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expect = |right: bool, what: String| {
        if !right {
            faults.push(what);
        }
    };
    expect(log["version"] == "2.1.0", "version".into());
    expect(log["$schema"].as_str().is_some_and(|s| s.ends_with("sarif-2.1.0.json")), "$schema".into());
    expect(log["runs"].as_array().is_some_and(|runs| runs.len() == 1), "one run".into());
    let run = &log["runs"][0];
    expect(run["tool"]["driver"]["name"] == "FlashCore", "the tool's name".into());
    let rules: Vec<&Value> = run["tool"]["driver"]["rules"].as_array().into_iter().flatten().collect();
    let ids: BTreeSet<&str> = rules.iter().filter_map(|rule| rule["id"].as_str()).collect();
    expect(ids.len() == rules.len(), format!("the rules' ids are unique: {ids:?}"));
    for result in run["results"].as_array().into_iter().flatten() {
        let index = result["ruleIndex"].as_u64().map(|index| index as usize);
        let rule = index.and_then(|index| rules.get(index)).map(|rule| &rule["id"]);
        expect(rule == Some(&result["ruleId"]), format!("ruleIndex: {result}"));
        let level = result["level"].as_str().unwrap_or("");
        expect(["none", "note", "warning", "error"].contains(&level), format!("level: {result}"));
        expect(
            result["message"]["text"].as_str().is_some_and(|t| !t.is_empty()),
            format!("message: {result}"),
        );
        let locations = result["locations"].as_array().into_iter().flatten();
        expect(locations.clone().count() == 1, format!("one location: {result}"));
        let related: Vec<&Value> = result["relatedLocations"].as_array().into_iter().flatten().collect();
        let numbers: BTreeSet<Option<u64>> = related.iter().map(|location| location["id"].as_u64()).collect();
        expect(numbers.len() == related.len(), format!("ids of related locations: {result}"));
        for location in locations.chain(related) {
            let place = &location["physicalLocation"];
            let uri = place["artifactLocation"]["uri"].as_str().unwrap_or(" ");
            expect(!uri.is_empty() && !uri.contains([' ', '\\']), format!("uri: {location}"));
            let line = place["region"]["startLine"].as_u64();
            expect(line.is_some_and(|line| line > 0), format!("startLine: {location}"));
        }
    }
    faults
}

#[test]
fn sarif_points_at_source_lines() {
    let Some(folder) = kernel("template_helper", "wrong") else { return };
    let (code, said, error) = check(&folder, "template_helper", &["--sarif", "found.sarif"]);
    assert!(code == Some(1) && said.starts_with("failed"), "{said}{error}");
    let written = std::fs::read_to_string(folder.0.join("found.sarif")).unwrap();
    let log: Value = serde_json::from_str(&written).unwrap();
    assert_eq!(faults(&log), [""; 0]);
    let result = &log["runs"][0]["results"][0];
    let place = &result["locations"][0]["physicalLocation"];
    assert_eq!((&result["ruleId"], &result["level"]), (&"race".into(), &"error".into()));
    assert_eq!(place["artifactLocation"]["uri"], "template_helper.cu");
    assert_eq!(place["region"]["startLine"], 10);
    let related: Vec<&Value> = result["relatedLocations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|l| &l["physicalLocation"]["region"]["startLine"])
        .collect();
    assert_eq!(related, [11, 17, 17], "the other access, and the call that was inlined");
    // With `-`, standard output carries the log and nothing else.
    let (_, said, _) = check(&folder, "template_helper", &["--sarif", "-"]);
    assert_eq!(said, written);
    for (more, words) in [
        (&["--sarif", "-", "--junit", "-"][..], "invalid value '-' for --junit"),
        (&["--sarif", "-", "--json"], "invalid value '-' for --sarif"),
        (&["--sarif", "template_helper.ptx"], "is the same file as FILE"),
        (&["--sarif", "no/such/folder/x"], "no/such/folder/x"),
    ] {
        let (code, _, error) = check(&folder, "template_helper", more);
        assert!(code == Some(3) && error.contains(words), "{more:?}: {error}");
    }
    // Without line information the places are those of the PTX, and a pass has no results.
    let plain = std::fs::read_to_string(folder.0.join("template_helper.ptx")).unwrap();
    folder.write("template_helper.ptx", &plain.replace(".loc", "// loc"));
    let (_, said, _) = check(&folder, "template_helper", &["--sarif", "-"]);
    let log: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(faults(&log), [""; 0]);
    let place = &log["runs"][0]["results"][0]["locations"][0]["physicalLocation"];
    assert_eq!(
        (&place["artifactLocation"]["uri"], &place["region"]["startLine"]),
        (&"template_helper.ptx".into(), &40.into())
    );
    let Some(right) = kernel("template_helper", "right") else { return };
    let log: Value = serde_json::from_str(&check(&right, "template_helper", &["--sarif", "-"]).1).unwrap();
    assert_eq!((faults(&log).len(), log["runs"][0]["results"].as_array().unwrap().len()), (0, 0));
}

/// The names of the elements of an XML text, in order. Panics if a tag is not closed.
fn elements(xml: &str) -> Vec<String> {
    let (mut open, mut all) = (Vec::new(), Vec::new());
    for tag in xml.split('<').skip(1).map(|part| part.split_once('>').expect("`<` begins a tag").0) {
        match tag.strip_prefix('/') {
            _ if tag.starts_with('?') => {}
            Some(name) => assert_eq!(open.pop().as_deref(), Some(name), "{xml}"),
            None => {
                let name = tag.split_whitespace().next().unwrap().to_owned();
                assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
                all.push(name.clone());
                open.push(name);
            }
        }
    }
    assert!(open.is_empty(), "{open:?}: {xml}");
    all
}

#[test]
fn junit_has_one_test_a_check() {
    let Some(folder) = kernel("template_helper", "wrong") else { return };
    let (_, xml, _) = check(&folder, "template_helper", &["--junit", "-"]);
    assert_eq!(elements(&xml), ["testsuites", "testsuite", "testcase", "failure"], "{xml}");
    for part in ["failures=\"1\"", "type=\"race\"", "race at template_helper.cu:10", "cure: "] {
        assert!(xml.contains(part), "{part}: {xml}");
    }
    let Some(right) = kernel("template_helper", "right") else { return };
    let (code, said, _) = check(&right, "template_helper", &["--junit", "out.xml"]);
    let xml = std::fs::read_to_string(right.0.join("out.xml")).unwrap();
    assert!(code == Some(0) && said.starts_with("passed"), "{said}");
    assert_eq!(elements(&xml), ["testsuites", "testsuite", "testcase"], "{xml}");
    let (_, xml, _) = check(&right, "template_helper", &["--junit", "-", "--timeout", "0.000001"]);
    assert_eq!(elements(&xml), ["testsuites", "testsuite", "testcase", "error"], "{xml}");
}

#[test]
fn the_gpu_of_the_diagnosis_can_be_named() {
    let Some(folder) = kernel("proxy_fence", "right") else { return };
    let (code, said, error) = check(&folder, "proxy_fence", &["--gpu", "H100"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(!said.contains("small grid"), "a check is made with a small launch: {said}");
    for gpu in ["L4", "H1000"] {
        let (code, _, error) = check(&folder, "proxy_fence", &["--gpu", gpu]);
        let expected = format!("invalid value '{gpu}' for --gpu: expected a GPU that runs sm_90: ");
        assert!(code == Some(3) && error.contains(&expected), "{error}");
    }
}

/// An entry may be named by its name in the PTX, or as the source spells it.
#[test]
fn entries_are_named_as_in_the_source() {
    let folder = Folder::new("entries");
    let entry = |name: &str| format!(".visible .entry {name}()\n{{\nret;\n}}\n");
    let entries = entry("_Z1kIfEvPT_") + &entry("_Z1kIdEvPT_");
    folder.write("k.ptx", &format!(".version 8.0\n.target sm_80\n.address_size 64\n{entries}"));
    folder.write("launch.toml", "[launch]\ngrid = [1]\nblock = [32]\n");
    let (code, _, error) = check(&folder, "k", &[]);
    assert!(code == Some(3) && error.contains("name one of: k<float>, k<double>"), "{error}");
    folder.write("launch.toml", "[launch]\nentry = \"_Z1kIfEvPT_\"\ngrid = [1]\nblock = [32]\n");
    let output = folder.run(&["explain", "k.ptx", "--launch", "launch.toml"]);
    assert!(text(&output.stdout).starts_with("k<float>: passed"), "{}", text(&output.stdout));
}

/// Runs the step of the action that checks every kernel in a separate project. With a failing kernel the step
/// fails, and both reports are written. With the findings as the baseline it passes.
#[test]
#[cfg(unix)]
fn the_action_checks_a_project() {
    let action = std::fs::read_to_string("../../.github/actions/check/action.yml").unwrap();
    let step = action.split_once("- name: Check each kernel that has a launch file\n").unwrap().1;
    let script = step.split_once("run: |\n").unwrap().1;
    let project = Folder::new("workflow");
    std::fs::create_dir(project.0.join("kernels")).unwrap();
    for (name, entry) in [("template_helper", "wrong"), ("trap", "right")] {
        let Some(made) = kernel(name, entry) else { return };
        for (from, to) in
            [(format!("{name}.cu"), format!("{name}.cu")), ("launch.toml".into(), format!("{name}.toml"))]
        {
            std::fs::copy(made.0.join(from), project.0.join("kernels").join(to)).unwrap();
        }
    }
    let command = Path::new(env!("CARGO_BIN_EXE_flashcore"));
    let path = format!("{}:{}", command.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let run = || {
        let mut shell = std::process::Command::new("bash");
        let inputs =
            [("KERNELS", "kernels"), ("BASELINE", "known"), ("REPORTS", "reports"), ("OPTIONS", "--quick")];
        shell.args(["-e", "-c", script]).env("PATH", &path).envs(inputs).current_dir(&project.0);
        shell.output().unwrap()
    };
    let output = run();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    if error.contains("FLASHCORE_NVRTC") {
        return filetest::not_run("NVRTC is missing");
    }
    let read = |file: &str| std::fs::read_to_string(project.0.join("reports").join(file)).unwrap();
    let log: Value = serde_json::from_str(&read("sarif/template_helper.sarif")).unwrap();
    assert_eq!(faults(&log), [""; 0]);
    let place = &log["runs"][0]["results"][0]["locations"][0]["physicalLocation"];
    assert_eq!(place["artifactLocation"]["uri"], "kernels/template_helper.cu");
    assert!(read("junit/template_helper.xml").contains("failures=\"1\""));
    assert!(read("junit/trap.xml").contains("failures=\"0\""));
    let log: Value = serde_json::from_str(&read("sarif/trap.sarif")).unwrap();
    assert_eq!((faults(&log), &log["runs"][0]["results"]), (Vec::new(), &serde_json::json!([])));
    assert_eq!(log["runs"][0]["automationDetails"]["id"], "flashcore/kernels/trap.toml/");
    std::fs::rename(project.0.join("reports/sarif"), project.0.join("known")).unwrap();
    let again = run();
    assert_eq!(again.status.code(), Some(0), "{}{}", text(&again.stdout), text(&again.stderr));
    assert!(text(&again.stdout).contains("; the baseline has it"), "{}", text(&again.stdout));
}
