//! Runs `flashcore explain` on files and on problems.

use crate::cli::{LAUNCH, PTX};
use crate::folder::{Folder, text};

#[test]
fn explain_names_causes_and_lines() {
    let folder = Folder::new("explain");
    let launch = folder.write("launch.toml", LAUNCH);
    let ptx = folder.write("right.ptx", &PTX.replace("BARRIER", "bar.sync 0;"));
    let output = folder.run(&["explain", &ptx, "--launch", &launch]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(shown.contains("predicted on L4") && shown.contains("st.shared.u32"), "{shown}");
    // The text uses words, not the names of Rust variants.
    assert!(
        !shown.contains("bound by L") && !shown.contains("Ptxas(") && !shown.contains("Estimate"),
        "{shown}"
    );
    // 256 bytes of a variable and 1024 that the launch states.
    let dynamic = LAUNCH.replace("block = [64]", "block = [64]\ndynamic_shared = 1024");
    let dynamic = folder.write("dynamic.toml", &dynamic);
    let shown = text(&folder.run(&["explain", &ptx, "--launch", &dynamic]).stdout);
    assert!(shown.contains(" 1280 bytes of shared memory"), "{shown}");
    let said = folder.run(&["explain", &ptx, "--launch", &dynamic, "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(said["resources"]["shared"], 1280);
    // `explain` explains kernels that fail their check.
    let racy = folder.write("racy.ptx", &PTX.replace("BARRIER", ""));
    let output = folder.run(&["explain", &racy, "--launch", &launch]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("shift: failed"), "{}", text(&output.stdout));
}

/// Without a file, `explain` analyses the reference problem with the plan that a user of the GPU gets.
#[test]
fn explain_and_climb_agree_on_the_mission() {
    use climb::{Climb, Options, climb, fused};
    let folder = Folder::new("mission");
    let explain = |gpu: &str| {
        let output = folder.run(&["explain", "--gpu", gpu, "--json"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (said["prediction"]["us"].as_f64().unwrap(), said["findings"][0]["name"].clone())
    };
    let problem = problem::Problem::mission();
    let ptxas = predict::resources::Ptxas::find().ok();
    let options = Options {
        settings: check::gate::Settings::quick(),
        ptxas: ptxas.as_ref(),
        cpu_seconds: None,
        machines: Options::machines_for(None),
        problem: problem.clone(),
    };
    let rung = fused(&problem, &kernels::Arch::SM_89).unwrap();
    let Climb { rungs, .. } = climb::<bench::gpu::Workbench>(&options, vec![rung], None, |_| ()).unwrap();
    let (us, finding) = explain("L4");
    let climbed = rungs[0].predicted_us().unwrap();
    // `climb` recorded the CTAs of one head, `explain` those of all heads.
    assert!((us / climbed - 1.0).abs() < 0.02, "{us} and {climbed}");
    assert_eq!(finding, rungs[0].study.findings[0].name.name());
    // An H200 ships with another kernel than an L4.
    let on_h200 = rungs[0].study.predictions[1].as_ref().unwrap().us;
    assert!(explain("H200").0 < 0.75 * on_h200, "{on_h200}");
}

#[test]
fn explain_says_which_plan_a_problem_gets() {
    let folder = Folder::new("choice");
    let ask = |more: &[&str]| {
        let args = ["explain", "--problem", "1,8,512,64,f16", "--device", "h200", "--json"];
        folder.run(&[&args[..], more].concat())
    };
    let output = ask(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let chosen: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // The tuned table has a row for the reference problem.
    assert_eq!((&chosen["source"], chosen["distance"].as_f64()), (&"tuned".into(), Some(0.0)));
    assert_eq!(chosen["plan"], chosen["row"]["plan"]);
    assert!(!chosen["why"].as_array().unwrap().is_empty());
    let other = folder.run(&["explain", "--problem", "1,8,512,64,f16", "--gpu", "h200", "--json"]);
    assert_eq!(text(&other.stdout), text(&output.stdout), "{}", text(&other.stderr));
    // The printed plan is accepted by `--plan`. An error names the wrong gene.
    let mut plan = chosen["plan"].clone();
    let output = ask(&["--plan", &plan.to_string()]);
    let given: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&given["source"], &given["plan"]), (&"given".into(), &plan));
    // The form that `topk` prints is accepted as well.
    let output = ask(&["--plan", &serde_json::json!({ "gpu": plan }).to_string()]);
    let given: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(given["plan"], plan, "{}", text(&output.stderr));
    plan["block_n"] = 17.into();
    for (args, message) in [
        (&["--plan", &plan.to_string()][..], "invalid value '17' for block_n"),
        (&["--plan", "{}"], "--plan"),
        (&["--device", "gtx480"], "cannot be used multiple times"),
    ] {
        let output = ask(args);
        assert_eq!(output.status.code(), Some(3));
        assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
    let output = folder.run(&["explain", "--problem", "1,8,512,64,f16", "--device", "gtx480"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("H200, H100"), "{}", text(&output.stderr));
}
