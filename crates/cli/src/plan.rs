//! Reads plans as JSON: a bare plan, as `explain --problem` prints it, or a candidate, as the ledger keeps it
//! and `topk` prints it: `{"gpu": {…}}`.

use cpu::CpuPlan;
use kernels::Plan;
use serde_json::{Map, Value};

use crate::error::CliError;

/// Reads a plan of the GPU kernels. `value` is the argument as the user wrote it: the JSON text, or the name
/// of the file that held `text`.
pub fn gpu(argument: &'static str, value: &str, text: &str) -> Result<Plan, CliError> {
    read(text, "gpu", serde_json::from_value).map_err(|why| refusal(argument, value, &why))
}

/// Reads a plan of the CPU kernels. The arguments are those of [`gpu`].
pub fn native(argument: &'static str, value: &str, text: &str) -> Result<CpuPlan, CliError> {
    read(text, "cpu", serde_json::from_value).map_err(|why| refusal(argument, value, &why))
}

fn refusal(argument: &'static str, value: &str, why: &str) -> CliError {
    let accepted =
        format!("one plan as JSON, as `explain --problem` and `topk` print it ({})", ptx::quote::words(why));
    CliError::Argument { argument, value: value.to_owned(), accepted }
}

fn read<P>(text: &str, key: &str, plan: impl Fn(Value) -> serde_json::Result<P>) -> Result<P, String> {
    let json = serde_json::from_str(text).map_err(|error| error.to_string())?;
    plan(bare(json, key)?).map_err(|error| error.to_string())
}

/// The value under `key` if `key` is the only key of the object, else the object itself. A candidate of
/// another kind is refused, and the message names the kind.
fn bare(json: Value, key: &str) -> Result<Value, String> {
    let only =
        |object: &Map<String, Value>| if object.len() == 1 { object.keys().next().cloned() } else { None };
    match (json.as_object().and_then(only).as_deref(), json) {
        (Some(found), Value::Object(mut object)) if found == key => {
            Ok(object.remove(key).unwrap_or_default())
        }
        (Some(found @ ("gpu" | "cpu" | "kernel")), _) => {
            Err(format!("this is a {found} plan; expected a {key} plan"))
        }
        (_, json) => Ok(json),
    }
}

#[cfg(test)]
mod tests {
    use kernels::Arch;
    use problem::Problem;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_plan_is_read_as_every_command_prints_it() {
        let plan = Plan::default_for(&Problem::mission(), &Arch::SM_89).unwrap();
        for text in [json!(plan), json!({ "gpu": plan })] {
            assert_eq!(gpu("--plan", "file", &text.to_string()).unwrap(), plan);
        }
        let native = CpuPlan::for_problem(&Problem::mission());
        let text = json!({ "cpu": native }).to_string();
        assert_eq!(super::native("--seed-plan", "file", &text).unwrap(), native);
        for (text, why) in [
            (text.as_str(), "this is a cpu plan; expected a gpu plan"),
            ("{\"kernel\": {}}", "this is a kernel plan"),
            ("{}", "missing field `family`"),
            ("{\"gpu\": {}}", "missing field `family`"),
            ("plan", "expected value"),
        ] {
            let error = gpu("--plan", "file", text).unwrap_err().to_string();
            assert!(
                error.starts_with("invalid value 'file' for --plan: expected one plan as JSON")
                    && error.contains(why),
                "{error}"
            );
        }
    }
}
