// How stale was what step 2 trained? Staleness: versions between the oldest token and the step's policy.
db.getCollection("audit_training").aggregate([
  { $match: { status: "committed", step: 2 } },
  {
    $group: {
      _id: "$staleness",
      trajectories: { $sum: 1 },
      generated_tokens: { $sum: "$generated_tokens" },
      mean_score: { $avg: "$score" },
      longest_way_seconds: { $max: "$seconds_from_claim_to_plan" },
    },
  },
  { $sort: { _id: 1 } },
]).toArray();
