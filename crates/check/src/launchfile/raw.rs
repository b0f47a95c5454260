//! The launch file as written: every key with its TOML type, not validated yet.

use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFile {
    pub problem: Option<RawProblem>,
    pub launch: RawLaunch,
    #[serde(default)]
    pub arg: Vec<RawArg>,
}

/// The table `[problem]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawProblem {
    pub batch: Option<i64>,
    pub heads_q: i64,
    pub heads_kv: Option<i64>,
    pub seq_q: i64,
    pub seq_kv: Option<i64>,
    pub head_dim: i64,
    pub head_dim_v: Option<i64>,
    pub dtype: String,
    pub mask: Option<String>,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
}

/// The table `[launch]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLaunch {
    pub entry: Option<String>,
    pub grid: Vec<i64>,
    pub cluster: Option<Vec<i64>>,
    pub block: Option<Vec<i64>>,
    pub dynamic_shared: Option<i64>,
    pub cooperative: Option<bool>,
}

/// An entry of `[[arg]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawArg {
    pub role: String,
    pub layout: Option<String>,
    pub dtype: Option<String>,
    pub elements: Option<i64>,
    pub init: Option<String>,
    pub value: Option<toml::Value>,
    pub of: Option<toml::Value>,
    pub dims: Option<Vec<i64>>,
    pub strides: Option<Vec<i64>>,
    pub offset: Option<i64>,
    #[serde(rename = "box")]
    pub box_extents: Option<Vec<i64>>,
    pub swizzle: Option<String>,
    pub fill: Option<String>,
}
