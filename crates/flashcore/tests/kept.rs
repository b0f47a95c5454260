//! The Rust API reads the user's saved plans, and a damaged file costs a warning and no result.

use std::process::Command;

use flashcore::{Device, Layout, TensorView, attention};

/// Set in the child process, which computes with the plans of the folder that its environment names.
const CHILD: &str = "FLASHCORE_TEST_KEPT";

#[test]
fn computes_in_a_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (q, v) = (vec![0.25f32; 2 * 32 * 16], (0..2 * 32 * 16).map(|i| i as f32).collect::<Vec<_>>());
    let view = |data| TensorView::dense(data, [1, 2, 32, 16], Layout::Bhsd).unwrap();
    let call = attention(view(&q), view(&q), view(&v)).causal().device(Device::Cpu);
    let out = call.run().unwrap();
    // All scores are equal, so row 1 is the mean of the first two values.
    assert_eq!(out.data[..16], v[..16]);
    assert!((out.data[16] - 8.0).abs() < 1e-5, "{}", out.data[16]);
}

/// What the child says on standard error with this file of plans.
fn said(name: &str, contents: &str) -> String {
    let folder = std::env::temp_dir().join(format!("flashcore-kept-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("plans.jsonl"), contents).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "computes_in_a_child", "--nocapture"]);
    let output = child.env(CHILD, "1").env("FLASHCORE_CONFIG_DIR", &folder).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
    said
}

#[test]
fn kept_plans_are_read_and_damage_is_a_warning() {
    let processor = cpu::kept::processor();
    let threads = cpu::threads();
    let plan = r#"{"isa":"portable","threads":1,"block_q":4,"block_kv":8}"#;
    let problem = r#"{"batch":1,"heads_q":2,"heads_kv":2,"seq_q":32,"seq_kv":32,"head_dim":16,"head_dim_v":16,"dtype":"f32","mask":"causal"}"#;
    let line = format!(
        r#"{{"processor":"{processor}","threads":{threads},"problem":{problem},"plan":{plan},"speedup":1.5,"source":"a test","when":"today"}}"#
    );
    assert_eq!(said("good", &line), "");
    let damaged = said("damaged", &format!("{}\n{line}\n", &line[..40]));
    assert!(damaged.contains("line 1 of ") && damaged.contains("plans.jsonl is ignored"), "{damaged}");
    let many = said("many", &format!("{}{line}\n", "no plan\n".repeat(300)));
    assert!(many.lines().count() == 1 && many.contains("300 lines of "), "{many}");
    let wrong = said("wrong", &line.replace("\"block_q\":4", "\"block_q\":0"));
    assert!(wrong.contains("invalid value '0' for plan.block_q"), "{wrong}");
}
