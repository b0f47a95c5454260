//! The launch file as parsed: every key with its TOML type, not validated yet.

use std::fmt;
use std::marker::PhantomData;

use problem::Scales;
use serde::Deserialize;
use serde::de::{
    DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer,
};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFile {
    pub problem: Option<RawProblem>,
    /// `[launch]`, or several `[[launch]]`.
    #[serde(deserialize_with = "one_or_many")]
    pub launch: Vec<RawLaunch>,
    #[serde(default)]
    pub arg: Vec<RawArg>,
    #[serde(default)]
    pub constant: Vec<RawConstant>,
    /// `[reference]`, or several `[[reference]]`.
    #[serde(default, deserialize_with = "one_or_many")]
    pub reference: Vec<RawReference>,
}

/// Reads one table or an array of tables.
fn one_or_many<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> Result<Vec<T>, D::Error> {
    struct Tables<T>(PhantomData<T>);

    impl<'de, T: DeserializeOwned> Visitor<'de> for Tables<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table or an array of tables")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<T>, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map)).map(|table| vec![table])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut tables: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(table) = tables.next_element()? {
                all.push(table);
            }
            Ok(all)
        }
    }

    from.deserialize_any(Tables(PhantomData))
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
    pub scales: Option<Scales>,
    pub inputs: Option<String>,
}

/// The table `[launch]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawLaunch {
    pub entry: Option<String>,
    pub grid: Vec<i64>,
    pub cluster: Option<Vec<i64>>,
    pub block: Option<Vec<i64>>,
    pub dynamic_shared: Option<i64>,
    pub cooperative: Option<bool>,
    pub constexpr: Option<toml::Table>,
    pub args: Option<Vec<toml::Value>>,
}

/// An entry of `[[arg]]`, or a field of a struct.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawArg {
    pub role: String,
    pub name: Option<String>,
    pub parameter: Option<bool>,
    pub layout: Option<String>,
    pub dtype: Option<String>,
    pub elements: Option<i64>,
    pub shape: Option<Vec<i64>>,
    pub init: Option<toml::Value>,
    pub value: Option<toml::Value>,
    pub of: Option<toml::Value>,
    pub dims: Option<Vec<i64>>,
    pub strides: Option<Vec<i64>>,
    pub offset: Option<i64>,
    pub plus: Option<i64>,
    pub addresses: Option<Vec<RawAddress>>,
    #[serde(rename = "box")]
    pub box_extents: Option<Vec<i64>>,
    pub swizzle: Option<String>,
    pub fill: Option<String>,
    pub memory: Option<String>,
    pub fields: Option<Vec<RawArg>>,
    pub bytes: Option<i64>,
}

/// An address in the contents of a buffer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawAddress {
    pub at: i64,
    pub of: toml::Value,
    pub plus: Option<i64>,
}

/// An entry of `[[constant]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawConstant {
    pub name: String,
    pub dtype: String,
    pub values: Option<Vec<toml::Value>>,
    pub init: Option<toml::Value>,
}

/// The table `[reference]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawReference {
    pub output: Option<toml::Value>,
    pub builtin: Option<String>,
    pub inputs: Option<Vec<toml::Value>>,
    pub kernel: Option<String>,
    pub entry: Option<String>,
    pub grid: Option<Vec<i64>>,
    pub cluster: Option<Vec<i64>>,
    pub block: Option<Vec<i64>>,
    pub dynamic_shared: Option<i64>,
    pub cooperative: Option<bool>,
    pub args: Option<Vec<toml::Value>>,
    pub file: Option<String>,
    pub python: Option<String>,
    pub timeout: Option<f64>,
    pub gradient: Option<String>,
    pub atol: Option<f64>,
    pub rtol: Option<f64>,
    pub operation: Option<String>,
    pub exclusive: Option<bool>,
    pub eps: Option<f64>,
    pub alpha: Option<f64>,
    pub beta: Option<f64>,
    pub base: Option<f64>,
    pub interleaved: Option<bool>,
    pub causal: Option<bool>,
    pub scale: Option<f64>,
}
