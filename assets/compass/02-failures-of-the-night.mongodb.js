// What failed in the last 12 hours, why, and what became of it?
db.getCollection("audit_failures").aggregate([
  { $match: { $expr: { $gte: ["$created_at", { $dateSubtract: { startDate: "$$NOW", unit: "hour", amount: 12 } }] } } },
  {
    $group: {
      _id: { kind: "$kind", then: "$then" },
      attempts: { $sum: 1 },
      newest_message: { $first: "$message" },
      newest_trajectory: { $first: "$_id" },
      newest_at: { $first: "$failed_at" },
    },
  },
  { $sort: { attempts: -1, "_id.kind": 1 } },
]).toArray();
