//! Options that have no effect beside other options are refused.

use crate::folder::{Folder, text};

/// Runs the command and expects exit code 3 with a message that contains `expected`.
fn refused(folder: &Folder, args: &[&str], expected: &str) {
    let output = folder.run(args);
    let (code, error) = (output.status.code(), text(&output.stderr));
    assert!(code == Some(3) && error.contains(expected), "{args:?}: {code:?} {error}");
}

#[test]
fn a_launch_is_stated_in_one_way() {
    let folder = Folder::new("one-launch");
    for option in [
        &["--block", "9999"][..],
        &["--cluster", "77"],
        &["--dynamic-shared", "99999999"],
        &["--arg", "bogus"],
        &["--cooperative"],
    ] {
        refused(
            &folder,
            &[&["check", "k.ptx", "--launch", "l.toml"], option].concat(),
            "cannot be used with",
        );
        refused(&folder, &[&["check", "k.ptx", "--suggest"], option].concat(), "cannot be used with");
    }
    for option in [&["--quick"][..], &["--timeout", "9"], &["--mutants", "3"], &["--coverage"]] {
        refused(&folder, &[&["check", "k.ptx", "--suggest"], option].concat(), "cannot be used with");
    }
}

#[test]
fn a_manual_page_is_that_of_a_command() {
    let folder = Folder::new("manual");
    for (words, page) in
        [(&["check"][..], "flashcore\\-check"), (&["ledger", "runs"], "flashcore\\-ledger\\-runs")]
    {
        let output = folder.run(&[&["man"], words].concat());
        assert!(output.status.success() && text(&output.stdout).contains(page), "{}", text(&output.stdout));
    }
    refused(&folder, &["man", "chek"], "invalid value 'chek' for COMMAND: expected one of climb, check, ");
    refused(
        &folder,
        &["man", "check", "plans"],
        "invalid value 'check plans' for COMMAND: expected no word after ",
    );
    refused(&folder, &["man", "check", "--out", "pages"], "cannot be used with");
}

#[test]
fn the_options_of_explain_belong_to_a_kernel_or_to_a_problem() {
    let folder = Folder::new("explain-options");
    let kernel = ["explain", "k.ptx", "--launch", "l.toml"];
    for kernel in [&kernel[..], &["explain"]] {
        refused(&folder, &[kernel, &["--device", "H200"]].concat(), "--device needs --problem; --gpu names");
        refused(&folder, &[kernel, &["--plan", "{}"]].concat(), "--plan needs --problem");
    }
    for option in [["--launch", "l.toml"], ["--against", "k.ptx"], ["--std", "20"], ["-D", "X"]] {
        let problem = ["explain", "--problem", "1,8,512,64,f16", "--device", "H200"];
        refused(&folder, &[&problem[..], &option].concat(), "cannot be used with");
    }
}

#[test]
fn a_problem_states_its_type_and_its_mask() {
    let folder = Folder::new("bench-options");
    for option in [["--dtype", "f16"], ["--mask", "causal"]] {
        refused(
            &folder,
            &[&["bench", "--problem", "1,8,512,64,f16"], &option[..]].concat(),
            "cannot be used",
        );
    }
}

#[test]
fn errors_about_arguments_are_one_line() {
    let folder = Folder::new("one-line");
    for (args, expected) in [
        (
            &["check", "k.ptx", "--lanch", "l.toml"][..],
            "unexpected argument '--lanch'; did you mean '--launch'?",
        ),
        (&["bench", "--xyz"], "unexpected argument '--xyz'"),
        (&["bench", "--json", "--json"], "'--json' cannot be used multiple times"),
        (&["plans", "add", "--plan", "p.json"], "missing '--problem <PROBLEM>'"),
        (
            &["run", "--q", "q.npy", "--layout", "hbsd"],
            "invalid value 'hbsd' for --layout: expected bhsd, bshd",
        ),
    ] {
        let output = folder.run(args);
        assert_eq!(text(&output.stderr), format!("flashcore: {expected}\n"));
    }
}

#[test]
fn options_about_another_language_are_refused() {
    let folder = Folder::new("languages");
    folder.write("l.toml", crate::cli::LAUNCH);
    for (option, language) in [
        (["--std", "20"], "CUDA C++"),
        (["-I", "."], "CUDA C++"),
        (["--with", "k.cu"], "CUDA C++"),
        (["--constexpr", "BLOCK=64"], "a Triton kernel"),
        (["--signature", "i32"], "a Triton kernel"),
        (["--num-warps", "4"], "a Triton kernel"),
    ] {
        let expected = format!("is for {language}, but k.ptx is PTX; omit --");
        for launch in [&["--launch", "l.toml"][..], &["--suggest"], &["--grid", "1"]] {
            refused(&folder, &[&["check", "k.ptx"], launch, &option].concat(), &expected);
        }
        refused(&folder, &[&["explain", "k.ptx", "--launch", "l.toml"], &option[..]].concat(), &expected);
        refused(&folder, &[&["explain"], &option[..]].concat(), "<FILE>");
    }
    let triton = ["check", "k.cu", "--launch", "l.toml", "--num-stages", "2"];
    refused(&folder, &triton, "--num-stages is for a Triton kernel, but k.cu is CUDA C++");
}

/// A message names the range that the command accepts.
#[test]
fn a_refused_number_is_outside_the_named_range() {
    let folder = Folder::new("ranges");
    for seconds in ["0", "-1", "nan", "inf", "3601"] {
        let expected = format!(
            "invalid value '{seconds}' for --seconds: expected a number of seconds above 0, at most 3600"
        );
        refused(&folder, &["plans", "check", "--seconds", seconds], &expected);
    }
    for (option, value) in [("--timeout", "1e300"), ("--budget", "inf"), ("--timeout", "1e-300")] {
        let expected =
            format!("invalid value '{value}' for {option}: expected a number of seconds above 0, at most");
        refused(&folder, &["check", "k.ptx", "--launch", "l.toml", option, value], &expected);
    }
    for cap in ["1e-60", "1e60"] {
        let run = ["run", "--q", "q.npy", "--out", "o.npy", "--softcap", cap];
        let expected = format!("invalid value '{cap}' for --softcap: expected 0 or a number from 1e-45");
        refused(&folder, &run, &expected);
    }
    for count in ["0", "-1"] {
        let some = "expected a whole number, 1 or more";
        refused(&folder, &["topk", "-k", count, "--problem", "1,8,512,64,f16", "--device", "h200"], some);
        refused(&folder, &["forecast", "list", "-n", count], some);
        refused(&folder, &["evolve", "--candidates", count], some);
    }
}

#[test]
fn a_missing_command_is_one_of_those_that_are_shown() {
    let folder = Folder::new("commands");
    let error = text(&folder.run(&["--json"]).stderr);
    assert!(error.contains("missing a command: expected one of climb, check, explain"), "{error}");
    assert!(!error.contains("worker") && !error.contains("sandboxed"), "{error}");
    refused(&folder, &["ledger", "--json"], "missing a command: expected one of export, check, runs");
}

#[test]
fn lines_are_part_of_the_json() {
    let folder = Folder::new("lines");
    refused(&folder, &["check", "k.ptx", "--launch", "l.toml", "--lines"], "--lines needs --json");
}

#[test]
fn an_architecture_exists() {
    let folder = Folder::new("architectures");
    for sm in ["9000", "81", "89a", "sm_", "x"] {
        let expected = format!("invalid value '{sm}' for --sm: expected an architecture, one of 50, 52");
        refused(&folder, &["check", "k.ptx", "--launch", "l.toml", "--sm", sm], &expected);
    }
    for known in ptx::Target::KNOWN {
        refused(&folder, &["check", "k.ptx", "--launch", "l.toml", "--sm", known], "cannot read");
    }
}

/// A list that begins with a negative number is a value, not an unknown option.
#[test]
fn lists_of_negative_numbers_are_values() {
    let folder = Folder::new("lists");
    let batches =
        "invalid value '-1,8,512,64,f16' for --problem: expected a whole number of batches in place of '-1'";
    refused(&folder, &["bench", "--problem", "-1,8,512,64,f16"], batches);
    refused(&folder, &["explain", "--device", "L4", "--problem", "-1,8,512,64,f16"], batches);
    let causl = "for --problem: expected a mask, which is none, causal";
    refused(&folder, &["bench", "--problem", "1,8,512,64,f16,causl"], causl);
    refused(
        &folder,
        &["check", "k.ptx", "--grid", "-1,3"],
        "invalid value '-1,3' for --grid: expected one to",
    );
    let tensor = check::files::Tensor {
        values: judge::values::Values::zeros(problem::DType::F32, 4 * 8),
        shape: vec![1, 1, 4, 8],
    };
    let tensors = ["q", "k", "v"].map(|name| (name.to_owned(), tensor.clone())).into();
    check::files::save(&folder.0.join("in.safetensors"), &tensors).unwrap();
    let run = ["run", "--q", "in.safetensors", "--out", "o.npy", "--window", "-1,3"];
    refused(&folder, &run, "invalid value '-1,3' for --window: expected BEFORE,AFTER");
}

/// `explain --plan` takes the JSON itself or a file, as the other commands do.
#[test]
fn a_plan_to_explain_is_json_or_a_file() {
    let folder = Folder::new("explain-plan");
    let explain = |plan: &[&str]| {
        let args = ["explain", "--problem", "1,8,512,64,f16,none", "--device", "L4", "--json"];
        let output = folder.run(&[&args, plan].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["plan"].to_string()
    };
    let plan = explain(&[]);
    let file = folder.write("plan.json", &plan);
    assert_eq!(explain(&["--plan", &plan]), plan);
    assert_eq!(explain(&["--plan", &file]), plan);
}
