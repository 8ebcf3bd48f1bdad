// Which tool is slow, and which one fails?
// It reads every model call of the run. For the last hours: audit_tool_calls with a $match on `created_at`.
db.getCollection("audit_tools").aggregate([
  { $sort: { p95_seconds: -1 } },
]).toArray();
